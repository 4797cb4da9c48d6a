"""Checks of kernel tests: bounds of rounding, and paged sequences with poison around them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch

BLOCK_SIZE = 16
MAP_NORESERVE = 0x4000  # Linux; the mmap module of Python 3.11 does not name it


def assert_as_accurate(
    result: Tensor, exact: Tensor, same_precision: Tensor, slack: float = 2.0, *, terms: float = 0.0
) -> None:
    """Check that `result` is about as near to the float64 result as the reference in the same precision is.

    `terms` is the magnitude of the summands where it exceeds that of the results: partial sums round at that magnitude.
    """
    assert result.dtype == same_precision.dtype
    assert result.shape == exact.shape
    assert not result.isnan().any(), "NaN from memory that must not be read is in the result"
    if result.numel() == 0:
        return
    error = (result.double() - exact).abs().max().item()
    unavoidable = (same_precision.double() - exact).abs().max().item()
    rounding = torch.finfo(result.dtype).eps * max(exact.abs().max().item(), terms)
    assert error <= slack * max(unavoidable, rounding), f"error {error:.3g}, that of the reference is {unavoidable:.3g}"


def tf32x3_slack(inputs: Tensor) -> float:
    """Return how much less accurate products of `inputs` are if Triton multiplies float32 as three TF32 products.

    Triton does so on a GPU: the parts of a factor hold 22 of its 24 bits. Elsewhere the result is 1.
    """
    return 4.0 if inputs.is_cuda and inputs.dtype == torch.float32 else 1.0


@dataclass(frozen=True)
class PagedSequences:
    kv: Tensor
    batch: AttentionBatch
    query_lens: Sequence[int]


def paged_sequences(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    value_dim: int | None = None,
    num_layers: int = 2,
    layer: int = 1,
    dtype: torch.dtype = torch.float32,
    block_size: int = BLOCK_SIZE,
    seed: int = 0,
) -> PagedSequences:
    """Return sequences in shuffled blocks, with NaN in all other memory: other layers, free blocks, tails of blocks."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(counts) + 2
    planes, width = (2, head_dim) if value_dim is None else (1, head_dim + value_dim)  # see `kernels.kv_rows`
    kv = torch.full((num_blocks, num_kv_heads, num_layers, planes, block_size, width), float("nan"), dtype=dtype)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.zeros(len(seq_lens), max(counts, default=0), dtype=torch.int32)
    for index, (count, length) in enumerate(zip(counts, seq_lens, strict=True)):
        blocks = [free.pop() for _ in range(count)]
        tables[index, :count] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(0, length, block_size):
            tokens = min(block_size, length - position)
            values = torch.randn(num_kv_heads, planes, tokens, width, generator=generator)
            kv[blocks[position // block_size], :, layer, :, :tokens] = values.to(dtype)
    return PagedSequences(kv, AttentionBatch.plan(query_lens, seq_lens, tables, block_size), query_lens)


def without_poison(kv: Tensor) -> Tensor:
    return torch.nan_to_num(kv.float(), nan=0.0).to(kv.dtype)  # torch has no nan_to_num for FP8


def poisoned_behind(sequences: PagedSequences, window: int) -> PagedSequences:
    """Return the sequences with NaN in each block that lies behind the window of their first query.

    Such blocks are given back: they may hold anything of other requests.
    """
    kv, batch = sequences.kv.clone(), sequences.batch
    for table, query_len, seq_len in zip(
        batch.block_tables, sequences.query_lens, batch.seq_lens.tolist(), strict=True
    ):
        num_hidden = max(0, seq_len - query_len + 1 - window) // kv.shape[4]
        kv.view(torch.uint8)[table[:num_hidden].long()] = 0xFF  # NaN in any type
    return PagedSequences(kv, batch, sequences.query_lens)


def untouched_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of any size that takes memory only for the pages that are written."""
    numel = 1
    for size in shape:
        numel *= size
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags=flags), dtype=dtype).view(shape)
