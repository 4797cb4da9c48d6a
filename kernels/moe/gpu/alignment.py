"""Alignment of (token, expert) pairs: they are sorted by expert and cut into tiles of rows, on the device.

    pair p = token * K + k                                     T = 3, K = 2, tiles of 2 rows
    expert_ids   [[4, 1], [4, 7], [4, 1]]
    order        [1, 5 | 0, 2, 4 | 3]                          pairs sorted by expert, then by number
    tiles        (1, 0, 2) (4, 2, 5) (4, 4, 5) (7, 5, 6)       expert, first row, end of the expert's rows
    num_tiles    4

Rows are indices in `order`. Shapes depend on T and K only: there are at most `most_tiles(...)` tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.launch import cdiv, next_power_of_2
from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous

CHUNK_TOKENS = 1024  # most tokens of a chunk
# If every program counts the pairs of all experts, that takes time in proportion to pairs x experts. Above this
# product, a kernel of its own counts them chunk by chunk, but in few chunks up to `CHUNK_TOKENS` tokens.
COUNTED_BY_ALL = 1 << 19
FEW_CHUNKS = 8


@dataclass(frozen=True)
class RowTiles:
    """The tiles of rows for the programs of a grouped product. Pairs with expert -1 are in no tile."""

    order: Tensor  # [T * K] int32
    table: Tensor  # [most_tiles, 3] int32
    count: Tensor  # [1] int32
    block_rows: int

    @property
    def most(self) -> int:
        return self.table.shape[0]


def most_tiles(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """Return the largest number of tiles of any routing: every expert's last tile may be partial."""
    ends = min(num_experts, num_pairs)
    return ends + (num_pairs - ends) // block_rows


def chunk_tokens(num_tokens: int, places: int, experts: int) -> int:
    """Return the tokens of a chunk: a power of two, as a token's `places` of pairs and the number of `experts` are."""
    whole = max(16, next_power_of_2(num_tokens))
    if whole > CHUNK_TOKENS:
        return CHUNK_TOKENS
    return min(whole, max(16, whole // FEW_CHUNKS, COUNTED_BY_ALL // (places * experts)))


def align(expert_ids: Tensor, num_experts: int, block_rows: int) -> RowTiles:
    """Sort and cut the pairs of expert_ids [T, K] int32."""
    num_tokens, top_k = expert_ids.shape
    device = expert_ids.device
    order = torch.empty(num_tokens * top_k, dtype=torch.int32, device=device)
    table = torch.empty((most_tiles(num_tokens * top_k, num_experts, block_rows), 3), dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    block_tokens = chunk_tokens(num_tokens, next_power_of_2(top_k), next_power_of_2(num_experts))
    num_chunks = cdiv(num_tokens, block_tokens)
    meta = {
        "TOP_K": top_k,
        "PLACES": next_power_of_2(top_k),
        "EXPERTS": next_power_of_2(num_experts),
        "BLOCK_TOKENS": block_tokens,
        "num_warps": max(1, min(8, block_tokens * next_power_of_2(top_k) // 256)),
        **launch_options(),
    }
    counts = None
    if num_chunks > 1:
        counts = torch.empty((num_chunks, meta["EXPERTS"]), dtype=torch.int32, device=device)
        count_kernel[(num_chunks,)](expert_ids, counts, num_tokens, **meta)
    place_kernel[(num_experts, num_chunks)](
        expert_ids,
        counts,
        order,
        table,
        count,
        num_tokens,
        num_experts,
        num_chunks,
        BLOCK_ROWS=block_rows,
        CHUNKS=next_power_of_2(num_chunks),
        **meta,
    )
    return RowTiles(order, table, count, block_rows)


@triton.jit(do_not_specialize=["num_tokens"])
def count_kernel(
    expert_ids,  # [T, TOP_K]
    counts,  # [chunks, EXPERTS]
    num_tokens,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Count the pairs of each expert in a chunk of tokens: one program per chunk."""
    let_next_start()
    chunk = tl.program_id(0)
    wait_for_previous()
    _, ids = _pairs_of(expert_ids, chunk, num_tokens, TOP_K, PLACES, BLOCK_TOKENS)
    tl.store(counts + chunk * EXPERTS + tl.arange(0, EXPERTS), _histogram(ids, EXPERTS))


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "num_chunks"])
def place_kernel(
    expert_ids,  # [T, TOP_K]
    counts,  # [num_chunks, EXPERTS], or None of one chunk
    order,  # [T * TOP_K]
    table,  # [most_tiles, 3]
    count,  # [1]
    num_tokens,
    num_experts,
    num_chunks,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,  # TOP_K, rounded up to a power of two
    EXPERTS: tl.constexpr,  # their number, rounded up to a power of two
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,  # num_chunks, rounded up to a power of two
):
    """Place the pairs of one expert and chunk, given all counts. Programs of the first chunk also write the tiles."""
    let_next_start()
    mine, chunk = tl.program_id(0), tl.program_id(1)
    expert = tl.arange(0, EXPERTS)
    wait_for_previous()

    pair, ids = _pairs_of(expert_ids, chunk, num_tokens, TOP_K, PLACES, BLOCK_TOKENS)
    if counts is None:
        totals = _histogram(ids, EXPERTS)
        in_chunks_before = 0
    else:
        other = tl.arange(0, CHUNKS)[:, None]
        by_chunk = tl.load(counts + other * EXPERTS + expert[None, :], mask=other < num_chunks, other=0)
        totals = tl.sum(by_chunk, 0)
        in_chunks_before = tl.sum(tl.sum(tl.where((other < chunk) & (expert == mine)[None, :], by_chunk, 0), 1), 0)
    first_row = tl.sum(tl.where(expert < mine, totals, 0), 0)

    if chunk == 0:
        tiles = (totals + BLOCK_ROWS - 1) // BLOCK_ROWS
        num_rows = tl.sum(tl.where(expert == mine, totals, 0), 0)
        first_tile = tl.sum(tl.where(expert < mine, tiles, 0), 0)
        for done in range(0, num_rows, BLOCK_ROWS):
            entry = table + (first_tile + done // BLOCK_ROWS) * 3
            tl.store(entry, mine)
            tl.store(entry + 1, first_row + done)
            tl.store(entry + 2, first_row + num_rows)
        if mine == num_experts - 1:
            tl.store(count, tl.sum(tiles, 0))

    hits = (ids == mine).to(tl.int32)
    of_token = tl.sum(hits, 1)
    before_token = tl.cumsum(of_token, 0) - of_token
    row = first_row + in_chunks_before + before_token[:, None] + tl.cumsum(hits, 1) - hits
    tl.store(order + row, pair, mask=hits > 0)


@triton.jit
def _pairs_of(expert_ids, chunk, num_tokens, TOP_K: tl.constexpr, PLACES: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Return the pairs of a chunk and their experts, [BLOCK_TOKENS, PLACES]; -1 for none."""
    token = chunk * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None]
    place = tl.arange(0, PLACES)[None, :]
    pair = token * TOP_K + place
    return pair, tl.load(expert_ids + pair, mask=(token < num_tokens) & (place < TOP_K), other=-1)


@triton.jit
def _histogram(ids, EXPERTS: tl.constexpr):
    flat = tl.reshape(ids, [ids.shape[0] * ids.shape[1]])
    return tl.histogram(flat, EXPERTS, mask=flat >= 0)
