"""Memory for results of absorbed attention: a row for each token and head, then the rows of parts.

    rows    | token 0: head 0, head 1, ... | token 1 ...     results of items that one program has read whole
            | group 0: program 0: part 0, part 1 | ...       parts, [rows of a tile, rank] each
    lse     of each row of a part: the log (base 2) of the sum of its exponentials, by which parts are weighted

Part 1 of a program belongs to the item that begins in its share, part 0 to the one that began in an earlier share. A
part is a result of its own, rounded as such. A row that sees no key in a part has a log-sum-exp of LOWEST there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .work_list import FIRST_PROGRAM, FIRST_TOKEN, ITEM_WORDS, LAST_PROGRAM, WorkList


@dataclass(frozen=True)
class PartialResults:
    """The memory of one layer's results. See the module."""

    attended: Tensor  # [num_tokens, heads, rank]
    parts: Tensor  # [groups, programs, 2, rows, rank], right behind `attended`
    lse: Tensor  # [groups, programs, 2, rows] float32

    @classmethod
    def empty(cls, q_latent: Tensor, work: WorkList) -> PartialResults:
        """Return memory for the results of queries [num_tokens, heads, rank]."""
        num_tokens, num_heads, rank = q_latent.shape
        shape = (work.tiles.groups(num_heads), work.num_programs, 2, work.tiles.rows)
        lse = torch.empty(shape, dtype=torch.float32, device=q_latent.device)
        whole = num_tokens * num_heads
        rows = q_latent.new_empty(whole + lse.numel(), rank)
        return cls(rows[:whole].view(num_tokens, num_heads, rank), rows[whole:].view(*shape, rank), lse)


@triton.jit
def part_row(program, begins, group, num_programs, row, ROWS: tl.constexpr):
    """Return the row, among those of parts, of a tile's row in a program's part 0 or (`begins`) 1; int64."""
    return ((group * num_programs + program).to(tl.int64) * 2 + begins) * ROWS + row


@triton.jit
def parts_of(token, head, is_real, items_ptr, token_items_ptr, num_programs, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """Return (number of parts, row of the first one, row of the second one) of tokens' results for a head.

    The number is 1 for a result that is whole, and 0 where `is_real` is false. Later parts are 2 * ROWS rows apart.
    """
    item = tl.load(token_items_ptr + token, mask=is_real, other=0)
    words = items_ptr + ITEM_WORDS * item
    first = tl.load(words + FIRST_PROGRAM, mask=is_real, other=0)
    last = tl.load(words + LAST_PROGRAM, mask=is_real, other=-1)
    row = (token - tl.load(words + FIRST_TOKEN, mask=is_real, other=0)) * HEADS + head % HEADS
    begun = part_row(first, True, head // HEADS, num_programs, row, ROWS)
    continued = part_row(first + 1, False, head // HEADS, num_programs, row, ROWS)
    return last - first + 1, begun, continued


@triton.jit
def part_at(index, lse_ptr, num_parts, whole_row, num_whole_rows, first_part, second_part, ROWS: tl.constexpr):
    """Return (row of memory, log-sum-exp) of parts number `index`: -inf where there is none, 0 for a whole result.

    `whole_row` is the results' row of `num_whole_rows`; the other arguments are as returned by `parts_of`.
    """
    part = tl.where(index == 0, first_part, second_part + (index - 1) * (2 * ROWS))
    lse = tl.load(lse_ptr + part, mask=index < tl.where(num_parts > 1, num_parts, 0), other=float("-inf"))
    lse = tl.where((index == 0) & (num_parts == 1), 0.0, lse)
    return tl.where(num_parts == 1, whole_row, num_whole_rows + part), lse
