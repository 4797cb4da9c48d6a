"""Steps of latent attention for the tests: shuffled pages with NaN wherever no query may read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch
from baton.kernels.mla import UpProjection, reference

from .kernel_checks import assert_as_accurate, without_poison

LAYER, NUM_LAYERS, BLOCK_SIZE = 1, 2, 16
SCALE = 0.2


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    rank: int = 32
    rope: int = 16
    nope: int = 32
    value: int = 32


SMALL = Shape()
DEEPSEEK_V2_LITE = Shape(16, 512, 64, 128, 128)


@dataclass(frozen=True)
class LatentStep:
    q: Tensor
    kv: Tensor
    batch: AttentionBatch
    up: UpProjection

    def attend(self, prepare: Callable[..., AttentionBatch], attention: Callable[..., Tensor]) -> Tensor:
        batch = prepare(self.batch, num_heads=self.q.shape[1], head_dim=self.q.shape[2])
        return attention(self.q, self.kv, LAYER, batch, self.up, scale=SCALE)

    def expected(self, dtype: torch.dtype) -> Tensor:
        """Return the reference's result for the same numbers in another precision."""
        up = dataclasses.replace(self.up, weight=self.up.weight.to(dtype))
        kv = without_poison(self.kv).to(dtype)
        return reference.mla_attention(self.q.to(dtype), kv, LAYER, self.batch, up, scale=SCALE)

    def check(self, result: Tensor, slack: float = 4.0) -> None:
        """Check that tokens other than padding are as accurate as the reference in the same precision."""
        real = self.batch.slots >= 0
        assert_as_accurate(
            result[real], self.expected(torch.float64)[real], self.expected(self.q.dtype)[real], slack=slack
        )
        assert result.isfinite().all()


def latent_step(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    device: torch.device,
    *,
    shape: Shape = SMALL,
    dtype: torch.dtype = torch.float32,
    num_kv_tokens: int | None = None,
    first_block: int = 0,
    seed: int = 0,
) -> LatentStep:
    """Draw a step. Blocks before `first_block` are unused."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // BLOCK_SIZE) for length in seq_lens]
    num_blocks = sum(counts) + 2
    width = shape.rank + shape.rope
    kv = torch.full((num_blocks, 1, NUM_LAYERS, 1, BLOCK_SIZE, width), float("nan"), dtype=dtype)
    tables = torch.zeros(len(seq_lens), max(counts), dtype=torch.int32)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    for index, (count, length) in enumerate(zip(counts, seq_lens, strict=True)):
        blocks = [free.pop() for _ in range(count)]
        tables[index, :count] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(0, length, BLOCK_SIZE):
            tokens = min(BLOCK_SIZE, length - position)
            values = torch.randn(tokens, width, generator=generator).to(dtype)
            kv[blocks[position // BLOCK_SIZE], 0, LAYER, 0, :tokens] = values
    placed = torch.empty((first_block + num_blocks, *kv.shape[1:]), dtype=dtype, device=device)
    placed[first_block:] = kv.to(device)
    batch = AttentionBatch.plan(query_lens, seq_lens, tables.to(device) + first_block, BLOCK_SIZE)
    q = torch.randn(batch.num_tokens, shape.num_heads, shape.nope + shape.rope, generator=generator)
    weight = torch.randn(shape.num_heads * (shape.nope + shape.value), shape.rank, generator=generator)
    return LatentStep(
        q.to(device, dtype),
        placed,
        dataclasses.replace(batch, num_kv_tokens=num_kv_tokens),
        UpProjection((weight * shape.rank**-0.5).to(device, dtype), shape.num_heads, shape.nope, shape.value),
    )


def padded(step: LatentStep, count: int) -> LatentStep:
    """Return the step as in a captured graph: in rows of a larger table, with `count` padding sequences and tokens."""
    batch = step.batch
    device = batch.seq_lens.device
    num_seqs, num_tokens = batch.num_seqs, batch.num_tokens
    rows = torch.randperm(num_seqs + 3, generator=torch.Generator().manual_seed(2))[:num_seqs].to(device)
    tables = torch.full((num_seqs + 3, batch.block_tables.shape[1]), -(2**31), dtype=torch.int32, device=device)
    tables[rows] = batch.block_tables
    decodes = batch.max_query_len == 1
    ends = torch.arange(1, count + 1, device=device) if decodes else torch.zeros(count, device=device)
    fill = torch.zeros(count, dtype=torch.int64, device=device)
    larger = dataclasses.replace(
        batch,
        query_start=torch.cat([batch.query_start, num_tokens + ends.int()]),
        seq_lens=torch.cat([batch.seq_lens, fill.int()]),
        positions=torch.cat([batch.positions, fill]),
        slots=torch.cat([batch.slots, fill - 1]),
        block_tables=tables,
        table_rows=torch.cat([rows.int(), fill.int()]),
        num_decodes=num_seqs + count if decodes else 0,
    )
    q = torch.cat([step.q, step.q.new_ones(count, *step.q.shape[1:])])
    return dataclasses.replace(step, q=q, batch=larger)
