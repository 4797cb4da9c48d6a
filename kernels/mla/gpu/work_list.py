"""Work partition of absorbed MLA: which program reads which tiles of keys, so that all programs end together.

    item      a few query tokens of one sequence, with all keys that the last of them sees, in tiles of `tile` keys
    tiles     of all items, in order:  | item 0        | item 1 |     | item 3                      |
    shares    of the programs:         | p0      | p1      | p2      | p3      | p4      | p5       |

If the end of a share cuts an item, both programs store their part of its softmax in a workspace. A program stores at
most two parts: of the item in which its share begins, and of the one in which it ends. The parts are added in the order
of the keys, by `combine` or by the last program with a part, which `arrivals` finds. Launches depend on shapes only;
lengths are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.launch import multiprocessors

# int32 words of an item, and of a program's share
ITEM_WORDS, SHARE_WORDS = tl.constexpr(4), tl.constexpr(2)
FIRST_TOKEN, NUM_QUERIES, NUM_VISIBLE, TABLE_ROW = (tl.constexpr(word) for word in range(ITEM_WORDS.value))
FIRST_TILE, FIRST_ITEM = (tl.constexpr(word) for word in range(SHARE_WORDS.value))


@dataclass(frozen=True)
class WorkTiles:
    """The tile sizes of one kernel: `rows` (`heads` heads of some query tokens) by `tile` keys."""

    rows: int
    heads: int
    tile: int

    @property
    def queries(self) -> int:
        return self.rows // self.heads

    def groups(self, num_heads: int) -> int:
        """Return the number of groups that the heads are divided into, each with its own programs."""
        return triton.cdiv(num_heads, self.heads)


@dataclass(frozen=True)
class WorkList:
    """The items of one step for one kernel, and each program's share of them."""

    items: Tensor  # [max_items, 4] int32: first token, number of tokens, keys that the first sees, row of block_tables
    starts: Tensor  # [max_items + 1] int32: tiles before each item; an item without tiles does not exist
    shares: Tensor  # [num_programs + 1, 2] int32: first tile of each program's share, and that tile's item
    # [groups, num_programs] int32: stored parts of the item that continues after the share; every layer resets them
    arrivals: Tensor

    @property
    def max_items(self) -> int:
        return self.items.shape[0]

    @property
    def num_programs(self) -> int:
        return self.shares.shape[0] - 1


def plan_work(batch: AttentionBatch, num_seqs: int, tiles: WorkTiles, num_heads: int, *, singles: bool) -> WorkList:
    """Plan the work of those of the first `num_seqs` sequences that have one query token (`singles`), or more.

    With singles, item i is sequence i. Otherwise the items of sequence i begin at i + query_start[i] // queries, which
    leaves room for all items without counting them.

    Later kernels may read the work list before they wait for their predecessor. So this kernel is launched without
    programmatic dependent launch: none of them starts before it has ended.
    """
    device, queries = batch.seq_lens.device, tiles.queries
    groups = tiles.groups(num_heads)
    num_programs = max(1, multiprocessors(device) // groups)
    max_items = num_seqs if singles else num_seqs + batch.num_tokens // queries
    items = torch.empty((max_items, ITEM_WORDS.value), dtype=torch.int32, device=device)
    starts = torch.empty(max_items + 1, dtype=torch.int32, device=device)
    shares = torch.empty((num_programs + 1, SHARE_WORDS.value), dtype=torch.int32, device=device)
    arrivals = torch.empty((groups, num_programs), dtype=torch.int32, device=device)
    rows = batch.table_rows
    plan_work_kernel[(1,)](
        batch.query_start,
        batch.seq_lens,
        batch.seq_lens if rows is None else rows,
        items,
        starts,
        shares,
        arrivals,
        num_seqs,
        max_items,
        num_programs,
        groups,
        max(num_seqs - 1, 0).bit_length(),
        max_items.bit_length(),
        HAS_TABLE_ROWS=rows is not None,
        SINGLES=singles,
        QUERIES=queries,
        TILE=tiles.tile,
        BLOCK=1024,
        num_warps=8,
    )
    return WorkList(items, starts, shares, arrivals)


@triton.jit
def num_active_programs(num_programs, num_tiles):
    """Return the number of programs that have a share of at least one tile; at least 1."""
    return tl.maximum(tl.minimum(num_programs, num_tiles), 1)


@triton.jit
def programs_of(start, end, num_tiles, num_programs):
    """Return the programs (first, last) that have the tiles `start` to `end` of an item; int64."""
    num_active = num_active_programs(num_programs, num_tiles).to(tl.int64)
    return ((start + 1) * num_active - 1) // num_tiles, (end * num_active - 1) // num_tiles


@triton.jit(
    do_not_specialize=["num_seqs", "max_items", "num_programs", "num_groups", "seq_search_steps", "item_search_steps"]
)
def plan_work_kernel(
    query_start_ptr,
    seq_lens_ptr,
    table_rows_ptr,
    items_ptr,
    starts_ptr,
    shares_ptr,
    arrivals_ptr,
    num_seqs,
    max_items,
    num_programs,
    num_groups,
    seq_search_steps,
    item_search_steps,
    HAS_TABLE_ROWS: tl.constexpr,
    SINGLES: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = 0
    for block in range(0, tl.cdiv(max_items, BLOCK)):
        item = block * BLOCK + tl.arange(0, BLOCK)
        exists = item < max_items
        if SINGLES:
            seq = item
            query = tl.zeros_like(item)
        else:
            seq = tl.zeros_like(item)  # the last sequence whose items begin at or before this one
            for step in range(0, seq_search_steps):
                next_seq = seq + (1 << (seq_search_steps - 1 - step))
                begin = next_seq + tl.load(query_start_ptr + next_seq, mask=next_seq < num_seqs, other=0) // QUERIES
                seq = tl.where((next_seq < num_seqs) & (begin <= item), next_seq, seq)
            first = seq + tl.load(query_start_ptr + seq, mask=exists, other=0) // QUERIES
            query = (item - first) * QUERIES
        first_token = tl.load(query_start_ptr + seq, mask=exists, other=0)
        num_tokens = tl.load(query_start_ptr + seq + 1, mask=exists, other=0) - first_token
        seq_len = tl.load(seq_lens_ptr + seq, mask=exists, other=0)
        has_work = exists & (query < num_tokens) & (seq_len > 0) & ((num_tokens == 1) == SINGLES)
        # Without work there is nothing to write: a program may pass the item between two others of its share.
        num_queries = tl.where(has_work, tl.minimum(num_tokens - query, QUERIES), 0)
        num_visible = seq_len - num_tokens + query + 1
        tiles = tl.where(has_work, tl.cdiv(num_visible + num_queries - 1, TILE), 0)
        table_row = seq
        if HAS_TABLE_ROWS:
            table_row = tl.load(table_rows_ptr + seq, mask=exists, other=0)
        words = items_ptr + ITEM_WORDS * item
        tl.store(words + FIRST_TOKEN, first_token + query, mask=exists)
        tl.store(words + NUM_QUERIES, num_queries, mask=exists)
        tl.store(words + NUM_VISIBLE, num_visible, mask=exists)
        tl.store(words + TABLE_ROW, table_row, mask=exists)
        tl.store(starts_ptr + item, total + tl.cumsum(tiles, 0) - tiles, mask=exists)
        total += tl.sum(tiles, 0)
    tl.debug_barrier()  # other threads read the starts than wrote them

    num_active = num_active_programs(num_programs, total)
    for block in range(0, tl.cdiv(num_programs + 1, BLOCK)):
        program = block * BLOCK + tl.arange(0, BLOCK)
        first_tile = (tl.minimum(program, num_active).to(tl.int64) * total // num_active).to(tl.int32)
        item = tl.zeros_like(program)  # the last item that begins at or before this tile, after any without tiles
        for step in range(0, item_search_steps):
            next_item = item + (1 << (item_search_steps - 1 - step))
            begin = tl.load(starts_ptr + next_item, mask=next_item < max_items, other=0)
            item = tl.where((next_item < max_items) & (begin <= first_tile), next_item, item)
        share = shares_ptr + SHARE_WORDS * program
        tl.store(share + FIRST_TILE, first_tile, mask=program <= num_programs)
        tl.store(share + FIRST_ITEM, item, mask=program <= num_programs)
        for group in range(0, num_groups):
            tl.store(arrivals_ptr + group * num_programs + program, 0, mask=program < num_programs)
    tl.debug_barrier()
    # release order: kernels that start early read all of this without waiting, once this program has ended
    tl.atomic_xchg(starts_ptr + max_items, total, sem="release")
