"""Work partition of prefill attention: tiles of queries, listed and sorted on the device once a step for all layers.

    query tokens   |  sequence 0           |  sequence 1   |2|  padding  |
    tiles          | 0     | 1     | 2     | 0     | 1     |0| 0   | 1   |      `tile_tokens` tokens each
    items          sorted: those that read the most keys first, then nothing

A tile is `tile_tokens` tokens of one sequence times `pack` query heads that read the same KV head: the rows of one
matrix product. The list has room for the worst case of its shapes, so that one captured graph serves any lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_batch import AttentionBatch

# int32 words of an item: first token in q, number of tokens, position of the first token, row of the block table
ITEM_WORDS = tl.constexpr(4)
FIRST_TOKEN, NUM_TOKENS, FIRST_POSITION, TABLE_ROW = (tl.constexpr(word) for word in range(ITEM_WORDS.value))
LONG_ROWS, SHORT_ROWS = 128, 64  # query rows of a tile: two warpgroups of 64, or one
MOST_DIMS_OF_LONG_ROWS = 256  # of a head: the sums of a long tile lie in registers
QUEUE_WORDS = 2  # the next tile to attend; programs that are through with all


@dataclass(frozen=True)
class KeySplit:
    """Workspace of prefill kernels that split the keys of a tile over programs (`prefill_split_kv`).

    A unit is one tile of queries for `pack` heads.
    """

    count: int  # of programs for each unit, at most
    sums: Tensor  # [units, count, rows, padded head_dim] float32: weighted sums of values
    tops: Tensor  # [units, count, 2, rows] float32: top scores, sums of weights
    arrivals: Tensor  # [units] int32: parts that are there; zero, and zero again after a kernel that counted


@dataclass(frozen=True)
class PrefillPlan:
    """The tiles of one step. A tile of sequences of length 0 starts at a negative position, so that it sees no key."""

    items: Tensor  # [num_items, ITEM_WORDS] int32; those behind the tiles have 0 tokens
    num_tiles: Tensor  # [1] int32: the items that are tiles
    queue: Tensor  # [QUEUE_WORDS] int32: zero, and zero again after a kernel that took its tiles from it
    rows: int  # of a tile: LONG_ROWS or SHORT_ROWS
    pack: int  # query heads in a tile; divides the query heads of a KV head
    tile_tokens: int  # rows // pack
    split: KeySplit | None = None  # of the keys of each tile; None: a program has them all

    @property
    def num_items(self) -> int:
        return self.items.shape[0]


def plan_prefill(
    batch: AttentionBatch,
    first_seq: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rows: int | None = None,
) -> PrefillPlan:
    """List the tiles of the sequences from `first_seq` on. The sequences before it have one query token each.

    Looks at shapes and at `max_query_len` only: safe inside a captured graph. `rows`: of a tile, other than fit best.
    """
    group = num_heads // num_kv_heads
    if rows is None:
        is_long = batch.max_query_len * group >= LONG_ROWS and head_dim <= MOST_DIMS_OF_LONG_ROWS
        rows = LONG_ROWS if is_long else SHORT_ROWS
    pack = heads_per_tile(group, rows)
    tile_tokens = rows // pack
    num_seqs = batch.num_seqs - first_seq
    num_items = _room_for_tiles(batch, first_seq, tile_tokens)
    device = batch.query_start.device
    listed = torch.empty((ITEM_WORDS.value + 1, num_items), dtype=torch.int32, device=device)
    items = torch.empty((num_items, ITEM_WORDS.value), dtype=torch.int32, device=device)
    num_tiles, queue = torch.empty(1 + QUEUE_WORDS, dtype=torch.int32, device=device).split([1, QUEUE_WORDS])
    list_tiles[(num_seqs + 1,)](
        batch.query_start,
        batch.seq_lens,
        batch.table_rows,
        listed,
        batch.num_tokens,
        first_seq,
        num_seqs,
        num_items,
        TILE_TOKENS=tile_tokens,
        BLOCK=128,
        num_warps=1,
    )
    sort_tiles[(triton.cdiv(num_items, 32),)](
        listed, items, num_tiles, queue, num_items, BLOCK=32, CHUNK=512, num_warps=4
    )
    return PrefillPlan(items, num_tiles, queue, rows, pack, tile_tokens)


def num_units_of(batch: AttentionBatch, first_seq: int, rows: int, num_heads: int, num_kv_heads: int) -> int:
    """Return the largest number of programs that tiles of `rows` need for all heads."""
    pack = heads_per_tile(num_heads // num_kv_heads, rows)
    return _room_for_tiles(batch, first_seq, rows // pack) * (num_heads // pack)


def _room_for_tiles(batch: AttentionBatch, first_seq: int, tile_tokens: int) -> int:
    """Return the largest number of tiles: each sequence, and the padding, may end in a partial tile."""
    return (batch.num_tokens - first_seq) // tile_tokens + batch.num_seqs - first_seq + 1


def heads_per_tile(group: int, rows: int) -> int:
    """Return how many of a KV head's `group` query heads share a tile: a divisor of `group` that fits.

    Warpgroups halve a long tile between them, so there it is a power of two; its tokens fill the rows in any case.
    """
    fitting = (heads for heads in range(1, min(group, SHORT_ROWS) + 1) if group % heads == 0)
    return max(heads for heads in fitting if rows == SHORT_ROWS or heads & (heads - 1) == 0)


@triton.jit(do_not_specialize=["num_tokens", "first_seq", "num_seqs", "num_items"])
def list_tiles(
    query_start,
    seq_lens,
    table_rows,
    listed,
    num_tokens,
    first_seq,
    num_seqs,
    num_items,
    TILE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the tiles of one sequence a program, word by word; the last word is the number of keys it reads (-1: no
    tile).

    Sequence i has the slots from query_start // TILE_TOKENS + i up to the next one's: enough for it whatever came
    before, without a sum over the others. The last program takes the tokens behind all sequences, as one of length 0.
    """
    index = tl.program_id(0)
    seq = first_seq + index
    is_padding = index == num_seqs
    start = tl.load(query_start + seq)
    end = tl.where(is_padding, num_tokens, tl.load(query_start + seq + 1, mask=index < num_seqs, other=0))
    seq_len = tl.load(seq_lens + seq, mask=index < num_seqs, other=0)
    row = seq
    if table_rows is not None:
        row = tl.load(table_rows + seq, mask=index < num_seqs, other=0)
    first_slot = (start - first_seq) // TILE_TOKENS + index
    last_slot = tl.where(is_padding, num_items, (end - first_seq) // TILE_TOKENS + index + 1)
    for base in range(first_slot, last_slot, BLOCK):
        slot = base + tl.arange(0, BLOCK)
        token = start + (slot - first_slot) * TILE_TOKENS
        count = tl.maximum(tl.minimum(end - token, TILE_TOKENS), 0)
        position = tl.where(seq_len > 0, seq_len - (end - token), -count)
        here = slot < last_slot
        tl.store(listed + FIRST_TOKEN * num_items + slot, token, mask=here)
        tl.store(listed + NUM_TOKENS * num_items + slot, count, mask=here)
        tl.store(listed + FIRST_POSITION * num_items + slot, position, mask=here)
        tl.store(listed + TABLE_ROW * num_items + slot, tl.zeros_like(slot) + row, mask=here)
        tl.store(listed + ITEM_WORDS * num_items + slot, tl.where(count > 0, position + count, -1), mask=here)


@triton.jit(do_not_specialize=["num_items"])
def sort_tiles(listed, items, num_tiles, queue, num_items, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Move each tile to its rank: the number of tiles that read more keys, or as many and are listed before it.

    Long tiles that start last would run alone at the end. Every pair is compared: there are a few thousand at most.
    """
    keys = listed + ITEM_WORDS * num_items
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = mine < num_items
    key = tl.load(keys + mine, mask=here, other=0)[:, None]
    rank = tl.zeros([BLOCK], tl.int32)
    tiles = 0
    for base in range(0, num_items, CHUNK):
        other = base + tl.arange(0, CHUNK)
        other_key = tl.load(keys + other, mask=other < num_items, other=-1)[None, :]
        before = (other_key > key) | ((other_key == key) & (other[None, :] < mine[:, None]))
        rank += tl.sum(before.to(tl.int32), 1)
        tiles += tl.sum((other_key >= 0).to(tl.int32))
    for word in tl.static_range(ITEM_WORDS):
        tl.store(items + rank * ITEM_WORDS + word, tl.load(listed + word * num_items + mine, mask=here), mask=here)
    if tl.program_id(0) == 0:
        tl.store(num_tiles, tiles)
        tl.store(queue, 0)
        tl.store(queue + 1, 0)
