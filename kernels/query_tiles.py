"""Work partition of prefill attention: tiles of queries, listed and sorted on the device once per step.

    query tokens   |  sequence 0           |  sequence 1   |2|  padding  |
    tiles          | 0     | 1     | 2     | 0     | 1     |0| 0   | 1   |      `tile_tokens` tokens each
    items          the tiles, those that read the most keys first; the rest is empty

A tile is `tile_tokens` tokens of one sequence times `pack` query heads that read the same KV head: the rows of one
matrix product. The list has room for the worst case of the step's shapes, so that one captured graph serves any
lengths.
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
MOST_DIMS_OF_LONG_ROWS = 256  # most head dimensions for long tiles, whose sums must fit in registers
QUEUE_WORDS = 2  # the next tile; the number of programs that have finished


@dataclass(frozen=True)
class KeySplit:
    """Workspace of prefill kernels that split the keys of a tile over programs (`prefill_split_kv`).

    A unit is one tile of queries for `pack` heads.
    """

    count: int  # most programs of a unit
    sums: Tensor  # [units, count, rows, padded head_dim] float32: weighted sums of values
    tops: Tensor  # [units, count, 2, rows] float32: top scores, sums of weights
    arrivals: Tensor  # [units] int32: stored parts; every kernel that uses it resets it to zero


@dataclass(frozen=True)
class PrefillPlan:
    """The tiles of one step. The tile of a sequence of length 0 begins at a negative position: it sees no key."""

    items: Tensor  # [num_items, ITEM_WORDS] int32; items after the tiles have 0 tokens
    num_tiles: Tensor  # [1] int32: number of items that are tiles
    queue: Tensor  # [QUEUE_WORDS] int32: every kernel that takes tiles from it resets it to zero
    rows: int  # rows of a tile: LONG_ROWS or SHORT_ROWS
    pack: int  # query heads in a tile; divides the query heads of a KV head
    tile_tokens: int  # rows // pack
    split: KeySplit | None = None  # None: the keys of a tile are not split, and one program reads them all

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
    """List the tiles of the sequences from `first_seq` on. Earlier sequences have one query token each.

    Reads only shapes and `max_query_len`, so a CUDA graph may capture it. `rows` overrides the best rows of a tile.
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
    """Return the largest possible number of tiles: each sequence, and the padding, may end in a partial tile."""
    return (batch.num_tokens - first_seq) // tile_tokens + batch.num_seqs - first_seq + 1


def heads_per_tile(group: int, rows: int) -> int:
    """Return how many of a KV head's `group` query heads share a tile: a divisor of `group`.

    For long tiles it is a power of two, since two warp groups each take half of the rows.
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
    """List the tiles of one sequence per program, word by word. The last word is the number of keys read (-1: no tile).

    The entries of sequence i begin at query_start // TILE_TOKENS + i. That leaves room for all its tiles, whatever the
    other lengths, without a prefix sum. The last program lists the tokens after all sequences, as one of length 0.
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
    """Sort tiles by the number of keys that they read, most first. A tile's rank is the number of tiles before it.

    If long tiles started last, they would run alone at the end. All pairs are compared: there are few thousand tiles.
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
