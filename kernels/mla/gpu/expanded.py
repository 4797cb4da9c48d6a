"""MLA for long prompts: keys and values of every head are computed once for all of a chunk's queries.

pages ──gather──> latents [K, rank + rope] ──kv_b_proj──> [K, heads, nope | value] ──causal attention──> out
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.launch import is_hopper
from baton.kernels.query_tiles import PrefillPlan, plan_prefill

from ..up_projection import MAX_EXPANDED_TOKENS, UpProjection
from . import dense, dense_hopper

LEAST_QUERIES = 128  # average queries per sequence; with fewer, expanding a key costs more than it saves
PAGE = 16
GATHER_ROWS = 16


@dataclass(frozen=True)
class ExpandedPrompts:
    """The sequences of a step whose keys and values are expanded, concatenated."""

    sources: Tensor  # [num_kv_tokens] int64: slot of every key; -1 for the rest, as num_kv_tokens is an upper bound
    key_start: Tensor  # [num_seqs + 1] int32: row of the first key of each sequence; 0 for the decodes
    plan: PrefillPlan


def pays_to_expand(batch: AttentionBatch) -> bool:
    """Return whether chunks are long enough, and the host knows an upper bound of their keys."""
    num_seqs, num_tokens = batch.num_seqs - batch.num_decodes, batch.num_tokens - batch.num_decodes
    if batch.num_kv_tokens is None or batch.num_kv_tokens > MAX_EXPANDED_TOKENS:
        return False
    return num_seqs > 0 and num_tokens >= LEAST_QUERIES * num_seqs


def expand(batch: AttentionBatch, num_heads: int, head_dim: int) -> ExpandedPrompts:
    """Plan the expansion: the source slot of every key, and the tiles of queries. Not for captured graphs."""
    assert batch.num_kv_tokens is not None
    first = batch.num_decodes
    key_start = functional.pad(batch.seq_lens[first:].cumsum(0, dtype=torch.int32), (first + 1, 0))
    sources = find_sources(batch, first, key_start, batch.num_kv_tokens, PAGE)
    by_number = dataclasses.replace(batch, table_rows=None)
    plan = plan_prefill(by_number, first, num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim)
    return ExpandedPrompts(sources, key_start, plan)


def expanded_attention(
    q: Tensor, kv: Tensor, layer: int, prompts: ExpandedPrompts, up: UpProjection, *, scale: float, out: Tensor
) -> None:
    """Write the rows of out [T, H, value_dim] that belong to `prompts`."""
    latents = gather(kv, layer, prompts.sources)
    keys_values = functional.linear(latents[:, : up.rank], up.weight).unflatten(1, (up.num_heads, -1))
    k_rope, plan = latents[:, up.rank :], prompts.plan
    kernel = dense_hopper if is_hopper(q.device) and dense_hopper.fits(q, keys_values, k_rope, plan) else dense
    kernel.dense_prefill(q, keys_values, k_rope, prompts.key_start, plan, scale=scale, out=out)


def find_sources(batch: AttentionBatch, first_seq: int, key_start: Tensor, num_rows: int, page: int) -> Tensor:
    """Return the slot of every key of the sequences from `first_seq` on: [num_rows] int64, -1 after the last key.

    Key j of sequence i is row key_start[i] + j; `key_start` is [num_seqs + 1] int32.
    """
    sources = torch.empty(num_rows, dtype=torch.int64, device=key_start.device)
    rows = batch.table_rows
    block = 256
    _find_sources[(triton.cdiv(num_rows, block),)](
        key_start,
        batch.block_tables,
        batch.block_tables if rows is None else rows,
        sources,
        first_seq,
        batch.num_seqs,
        num_rows,
        batch.block_tables.stride(0),
        max(batch.num_seqs - first_seq - 1, 0).bit_length(),
        HAS_TABLE_ROWS=rows is not None,
        PAGE=page,
        BLOCK=block,
    )
    return sources


def gather(kv: Tensor, layer: int, sources: Tensor) -> Tensor:
    """Copy slots `sources` [rows] of `layer` of kv [blocks, 1, layers, 1, page, width] to [rows, width]; -1: zeros."""
    num_rows, width = sources.shape[0], kv.shape[5]
    out = torch.empty((num_rows, width), dtype=kv.dtype, device=kv.device)
    _gather[(triton.cdiv(num_rows, GATHER_ROWS),)](
        kv,
        sources,
        out,
        layer * kv.stride(2),
        kv.stride(0),
        num_rows,
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        PAGE=kv.shape[4],
        ROWS=GATHER_ROWS,
        num_warps=8,
    )
    return out


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "num_rows", "search_steps"])
def _find_sources(
    key_start_ptr,
    tables_ptr,
    table_rows_ptr,
    sources_ptr,
    first_seq,
    num_seqs,
    num_rows,
    table_stride,
    search_steps,
    HAS_TABLE_ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seq = tl.zeros_like(row) + first_seq  # the last sequence that begins at or before this row
    for step in range(0, search_steps):
        next_seq = seq + (1 << (search_steps - 1 - step))
        begin = tl.load(key_start_ptr + next_seq, mask=next_seq < num_seqs, other=0)
        seq = tl.where((next_seq < num_seqs) & (begin <= row), next_seq, seq)
    key = row - tl.load(key_start_ptr + seq)
    exists = row < tl.load(key_start_ptr + num_seqs)
    table_row = seq
    if HAS_TABLE_ROWS:
        table_row = tl.load(table_rows_ptr + table_row)
    block = tl.load(tables_ptr + table_row.to(tl.int64) * table_stride + key // PAGE, mask=exists, other=0)
    source = tl.where(exists, block.to(tl.int64) * PAGE + key % PAGE, -1)
    tl.store(sources_ptr + row, source, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _gather(
    kv_ptr,
    sources_ptr,
    out_ptr,
    layer_offset,
    block_stride,
    num_rows,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    source = tl.load(sources_ptr + row, mask=row < num_rows, other=-1)
    address = kv_ptr + layer_offset + source // PAGE * block_stride + source % PAGE * WIDTH
    values = tl.load(address[:, None] + column, mask=(source >= 0)[:, None] & (column < WIDTH), other=0.0)
    target = out_ptr + row.to(tl.int64)[:, None] * WIDTH + column
    tl.store(target, values, mask=(row < num_rows)[:, None] & (column < WIDTH))
