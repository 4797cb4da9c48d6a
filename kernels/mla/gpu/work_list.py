"""Work partition of absorbed MLA: which program reads which tiles of keys, so that all programs end together.

    item      a few query tokens of one sequence, with all keys that the last of them sees, in tiles of `tile` keys
    tiles     of all items, in order:  | item 0        | item 1 |     | item 3                      |
    shares    of the programs:         | p0      | p1      | p2      | p3      | p4      | p5       |

An item in several shares has parts: the programs' results for their keys, which are merged afterwards
(`partial_results`). Parts cost time, so the plan chooses the cut with the fewest of them whose longest share is at most
an eighth and one tile longer than the average:

    PIECES    every share is a piece of one item, of a common length             at most one part per program
    WHOLE     shares of a common length, each extended to the end of its last item        no parts
    EVEN      shares differ by one tile at most                                  at most two parts per program

Launches depend on shapes only; lengths are read on the device.
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
ITEM_WORDS, SHARE_WORDS = tl.constexpr(7), tl.constexpr(2)
FIRST_TOKEN, NUM_QUERIES, NUM_VISIBLE, NUM_CACHED, TABLE_ROW, FIRST_PROGRAM, LAST_PROGRAM = (
    tl.constexpr(word) for word in range(ITEM_WORDS.value)
)
FIRST_TILE, FIRST_ITEM = (tl.constexpr(word) for word in range(SHARE_WORDS.value))
EVEN, PIECES, WHOLE = (tl.constexpr(cut) for cut in range(3))

LENGTHS = tl.constexpr(16)  # lengths of shares that are tried
SLACK = tl.constexpr(8)  # the longest of them exceeds the average by 1 / SLACK, and a tile


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
    """The items of one step, and each program's share of them."""

    tiles: WorkTiles
    items: Tensor  # [max_items, 7] int32: the words of an item, named above; NUM_VISIBLE is for the item's first token
    starts: Tensor  # [max_items + 1] int32: tiles before each item; an item without tiles does not exist
    shares: Tensor  # [num_programs + 1, 2] int32: first tile of each program's share, and an item at or before it
    token_items: Tensor  # [num_tokens] int32: item of each token; arbitrary for padding
    num_items: int  # at least so many have tiles, if no sequence is padding

    @property
    def max_items(self) -> int:
        return self.items.shape[0]

    @property
    def num_programs(self) -> int:
        return self.shares.shape[0] - 1


def plan_work(
    batch: AttentionBatch, num_seqs: int, num_tokens: int, tiles: WorkTiles, num_heads: int, *, singles: bool
) -> WorkList:
    """Plan the work of the first `num_seqs` sequences, which have `num_tokens` query tokens.

    With `singles`, none of them has more than one, and item i is sequence i. Otherwise the items of sequence i begin at
    i + query_start[i] // queries, which leaves room for all items without counting them.

    Later kernels may read the work list before they wait for their predecessor. So this kernel is launched without
    programmatic dependent launch: none of them starts before it has ended.
    """
    device, queries = batch.seq_lens.device, tiles.queries
    num_programs = max(1, multiprocessors(device) // tiles.groups(num_heads))
    max_items = num_seqs if singles else num_seqs + num_tokens // queries
    items = torch.empty((max_items, ITEM_WORDS.value), dtype=torch.int32, device=device)
    starts = torch.empty(max_items + 1, dtype=torch.int32, device=device)
    shares = torch.empty((num_programs + 1, SHARE_WORDS.value), dtype=torch.int32, device=device)
    token_items = torch.empty(num_tokens, dtype=torch.int32, device=device)
    rows = batch.table_rows
    plan_work_kernel[(1,)](
        batch.query_start,
        batch.seq_lens,
        batch.seq_lens if rows is None else rows,
        items,
        starts,
        shares,
        token_items,
        num_seqs,
        num_seqs if batch.drafted else min(num_seqs, batch.num_decodes),
        max_items,
        num_programs,
        max(num_seqs - 1, 0).bit_length(),
        max_items.bit_length(),
        HAS_TABLE_ROWS=rows is not None,
        SINGLES=singles,
        QUERIES=queries,
        TILE=tiles.tile,
        BLOCK=256,
        num_warps=8,
    )
    return WorkList(tiles, items, starts, shares, token_items, max(num_seqs, num_tokens // queries))


@triton.jit(
    do_not_specialize=[
        "num_seqs",
        "num_decodes",
        "max_items",
        "num_programs",
        "seq_search_steps",
        "item_search_steps",
    ]
)
def plan_work_kernel(
    query_start_ptr,
    seq_lens_ptr,
    table_rows_ptr,
    items_ptr,
    starts_ptr,
    shares_ptr,
    token_items_ptr,
    num_seqs,
    num_decodes,
    max_items,
    num_programs,
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
        has_work = exists & (query < num_tokens) & (seq_len > 0)
        num_queries = tl.where(has_work, tl.minimum(num_tokens - query, QUERIES), 0)
        num_visible = seq_len - num_tokens + query + 1
        num_tiles = tl.where(has_work, tl.cdiv(num_visible + num_queries - 1, TILE), 0)
        table_row = seq
        if HAS_TABLE_ROWS:
            table_row = tl.load(table_rows_ptr + seq, mask=exists, other=0)
        words = items_ptr + ITEM_WORDS * item
        tl.store(words + FIRST_TOKEN, first_token + query, mask=exists)
        tl.store(words + NUM_QUERIES, num_queries, mask=exists)
        tl.store(words + NUM_VISIBLE, num_visible, mask=exists)
        tl.store(words + NUM_CACHED, tl.where(seq < num_decodes, seq_len - num_tokens, 0), mask=exists)
        tl.store(words + TABLE_ROW, table_row, mask=exists)
        for index in tl.static_range(QUERIES):
            tl.store(token_items_ptr + first_token + query + index, item, mask=index < num_queries)
        tl.store(starts_ptr + item, total + tl.cumsum(num_tiles, 0) - num_tiles, mask=exists)
        total += tl.sum(num_tiles, 0)
    tl.debug_barrier()  # other threads read the starts than wrote them

    cut, length = _choose_cut(starts_ptr, total, max_items, num_programs, item_search_steps, BLOCK)
    _assign_programs(items_ptr, starts_ptr, total, max_items, num_programs, cut, length, BLOCK)
    tl.debug_barrier()
    for block in range(0, tl.cdiv(num_programs + 1, BLOCK)):
        program = block * BLOCK + tl.arange(0, BLOCK)
        if cut == PIECES:
            first_programs = items_ptr + FIRST_PROGRAM
            item = _last_at_most(first_programs, ITEM_WORDS, program, max_items, item_search_steps)
            piece = program - tl.load(first_programs + ITEM_WORDS * item)
            first_tile = tl.minimum(tl.load(starts_ptr + item) + piece * length, total)
        elif cut == WHOLE:
            item, first_tile = _first_start_from(starts_ptr, program * length, total, max_items, item_search_steps)
        else:
            num_active = num_active_programs(num_programs, total)
            first_tile = (tl.minimum(program, num_active).to(tl.int64) * total // num_active).to(tl.int32)
            item = _last_at_most(starts_ptr, 1, first_tile, max_items, item_search_steps)
        share = shares_ptr + SHARE_WORDS * program
        tl.store(share + FIRST_TILE, first_tile, mask=program <= num_programs)
        tl.store(share + FIRST_ITEM, item, mask=program <= num_programs)
    tl.debug_barrier()
    # release order: kernels that start early read all of this without waiting, once this program has ended
    tl.atomic_xchg(starts_ptr + max_items, total, sem="release")


@triton.jit
def num_active_programs(num_programs, num_tiles):
    """Return the number of programs that an even cut gives at least one tile; at least 1."""
    return tl.maximum(tl.minimum(num_programs, num_tiles), 1)


@triton.jit
def _tiles_of(starts_ptr, block, total, max_items, BLOCK: tl.constexpr):
    """Return (item, its first tile, its number of tiles) for a block of items; no tiles where there is no item."""
    item = block * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts_ptr + item, mask=item < max_items, other=total)
    end = tl.load(starts_ptr + item + 1, mask=item + 1 < max_items, other=total)
    return item, start, end - start


@triton.jit
def _choose_cut(starts_ptr, total, max_items, num_programs, search_steps, BLOCK: tl.constexpr):
    """Return (cut, length of shares); an even cut has no such length."""
    average = tl.cdiv(total, num_programs)
    lengths = average + tl.arange(0, LENGTHS) * (average // SLACK + 1) // (LENGTHS - 1)
    lengths = tl.maximum(lengths, 1)
    longest = tl.max(lengths, 0)
    cut = EVEN
    length = 0
    num_pieces = tl.zeros((LENGTHS,), tl.int32)
    for block in range(0, tl.cdiv(max_items, BLOCK)):
        _, _, num_tiles = _tiles_of(starts_ptr, block, total, max_items, BLOCK)
        num_pieces += tl.sum(tl.cdiv(num_tiles[None, :], lengths[:, None]), 1)
    least = tl.min(tl.where(num_pieces <= num_programs, lengths, longest + 1), 0)
    if least <= longest:
        cut = PIECES
        length = least
    else:
        sizes = tl.zeros((LENGTHS,), tl.int32)  # of the longest share
        for block in range(0, tl.cdiv(num_programs, BLOCK)):
            begins = (block * BLOCK + tl.arange(0, BLOCK))[None, :] * lengths[:, None]
            _, first = _first_start_from(starts_ptr, begins, total, max_items, search_steps)
            _, end = _first_start_from(starts_ptr, begins + lengths[:, None], total, max_items, search_steps)
            sizes = tl.maximum(sizes, tl.max(end - first, 1))
        shortest = tl.min(sizes, 0)
        if shortest <= longest:
            cut = WHOLE
            length = tl.min(tl.where(sizes == shortest, lengths, longest), 0)
    return cut, length


@triton.jit
def _assign_programs(items_ptr, starts_ptr, total, max_items, num_programs, cut, length, BLOCK: tl.constexpr):
    """Write the first and the last program of every item."""
    pieces_before = 0
    for block in range(0, tl.cdiv(max_items, BLOCK)):
        item, start, num_tiles = _tiles_of(starts_ptr, block, total, max_items, BLOCK)
        if cut == PIECES:
            pieces = tl.cdiv(num_tiles, length)
            first = pieces_before + tl.cumsum(pieces, 0) - pieces
            last = first + pieces - 1
            pieces_before += tl.sum(pieces, 0)
        elif cut == WHOLE:
            first = start // length
            last = first
        else:
            num_active = num_active_programs(num_programs, total).to(tl.int64)
            first = (((start + 1) * num_active - 1) // tl.maximum(total, 1)).to(tl.int32)
            last = (((start + num_tiles) * num_active - 1) // tl.maximum(total, 1)).to(tl.int32)
        words = items_ptr + ITEM_WORDS * item
        tl.store(words + FIRST_PROGRAM, first, mask=item < max_items)
        tl.store(words + LAST_PROGRAM, last, mask=item < max_items)


@triton.jit
def _last_at_most(ptr, STRIDE: tl.constexpr, limit, max_items, search_steps):
    """Return the last item whose word at `ptr` is at most `limit`, or 0. The words of the items ascend."""
    item = tl.zeros_like(limit)
    for step in range(0, search_steps):
        next_item = item + (1 << (search_steps - 1 - step))
        word = tl.load(ptr + STRIDE * next_item, mask=next_item < max_items, other=0)
        item = tl.where((next_item < max_items) & (word <= limit), next_item, item)
    return item


@triton.jit
def _first_start_from(starts_ptr, tile, total, max_items, search_steps):
    """Return (item, its first tile) for the first item that begins at `tile` or later; `total` if there is none."""
    before = _last_at_most(starts_ptr, 1, tile - 1, max_items, search_steps)
    item = tl.where(tile > 0, before + 1, 0)
    return item, tl.load(starts_ptr + item, mask=item < max_items, other=total)
