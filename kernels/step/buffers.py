"""The tensors that a step reads and writes apart from the model's, allocated once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

PIECE = 1024  # most int32 values of a piece of `apply_writes`, which one program copies
REJECTED = -2  # in a page: a draw after a wrong draft


@dataclass(frozen=True)
class StepTables:
    """The state of each row that persists from step to step."""

    tokens: Tensor  # [num_rows, max_model_len] int32: prompt, then output
    blocks: Tensor  # [groups, num_rows, max_blocks] int32: tokens 16 i ... 16 i + 15 lie in block blocks[g, row, i]
    computed: Tensor  # [num_rows] int32: number of tokens whose KV exists; a step begins after them, and advances it
    block_size: int


@dataclass(frozen=True)
class StepBatch:
    """The rows of a step, all int32. Sequences that only pad a captured step have row -1."""

    rows: Tensor  # [num_seqs]
    query_start: Tensor  # [num_seqs + 1]  padding sequences begin and end where the real tokens end
    samples: Tensor  # [num_seqs]  non-zero if the step reaches the row's last token, so that a token is drawn
    # [num_seqs + 1]  for steps with drafts: draws draw_start[i] ... draw_start[i + 1] - 1 follow sequence i's last
    # tokens. A sequence that draws nothing has one entry, padding has none.
    draw_start: Tensor


@dataclass(frozen=True)
class StepBuffers:
    """The inputs of one step, by sequence [S] and by token [T].

    A padding sequence has length 0, table row 0 and last token 0; a padding token has id 0, position 0 and slot -1.
    """

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int64
    slots: Tensor  # [groups, T] int64: where the token's KV goes in each cache group
    seq_lens: Tensor  # [S] int32: tokens of the row whose KV exists after the step
    table_rows: Tensor  # [S] int32
    last_tokens: Tensor  # [S] int64: index of each sequence's last token in the step


@dataclass(frozen=True)
class RowGuesses:
    """Draft tokens of rows."""

    token_ids: Tensor  # [num_rows, width] int32
    first: Tensor  # [num_rows] int32: the index in the row of the first draft


@dataclass(frozen=True)
class DrawPlaces:
    """The row and position of each of the D draws of a step with drafts. Entries without a draw have row -1."""

    rows: Tensor  # [D] int32
    positions: Tensor  # [D] int32: number of tokens of the row before the drawn one
    tokens: Tensor  # [D] int64: index in the step of the token before the drawn one; 0 for padding


@dataclass(frozen=True)
class OutputRing:
    """Drawn tokens for the CPU: pages of pinned memory, which steps write in turn."""

    pages: Tensor  # [num_pages, max_num_draws] int32
    turn: Tensor  # [1] int32, on the device: the page that the next step writes
