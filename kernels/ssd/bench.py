"""Benchmark of Mamba-2's recurrence at the sizes of Nemotron-H, and of Granite-4 with its one group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.roofline import BenchCase, cycling
from baton.kernels.state_bench import bench_steps, states_beyond_caches

from . import CHUNK, StateBatch, TimeSteps, ssd


@dataclass(frozen=True)
class MambaModel:
    name: str
    num_heads: int
    num_groups: int
    head_dim: int = 64
    state_dim: int = 128

    @property
    def state_bytes(self) -> int:
        return 4 * self.num_heads * self.head_dim * self.state_dim


NEMOTRON_H, GRANITE_4 = MambaModel("Nemotron-H", 128, 8), MambaModel("Granite-4", 48, 1)


@dataclass(frozen=True)
class MambaInputs:
    """A step's tensors: more states than fit in a hardware cache, and several batches, each with its own slots."""

    x: Tensor
    b: Tensor
    c: Tensor
    time_steps: TimeSteps
    skip: Tensor
    state: Tensor
    batches: list[StateBatch]

    @property
    def num_bytes(self) -> int:
        """Bytes of all inputs and outputs except states."""
        return sum(rows.nbytes for rows in (self.x, self.x, self.b, self.c, self.time_steps.raw))

    def run(self, op: Callable[..., object] = ssd, **options: object) -> Callable[[], object]:
        def once(batch: StateBatch) -> object:
            return op(self.x, self.b, self.c, self.time_steps, self.state, batch, skip=self.skip, **options)

        return cycling(once, self.batches)


def cases(device: torch.device) -> Iterator[BenchCase]:
    for model, (name, lengths) in itertools.product((NEMOTRON_H, GRANITE_4), bench_steps(device).items()):
        made = step(model, lengths, device)
        yield BenchCase(
            op="ssd",
            shape=f"{model.name} {name}",
            dtype=made.x.dtype,
            device=device,
            run=made.run(),
            num_bytes=2 * model.state_bytes * len(lengths) + made.num_bytes,
            flop=flop(model, sum(lengths)) if max(lengths) > 1 else 0.0,
        )


def flop(model: MambaModel, num_tokens: int) -> float:
    """Return the FLOP of both products with states, and of the causal half of products within chunks."""
    states = 2 * model.num_heads * model.head_dim * model.state_dim
    chunks = CHUNK / 2 * (model.num_heads * model.head_dim + model.num_groups * model.state_dim)
    return 2.0 * num_tokens * (states + chunks)


def step(
    model: MambaModel, lengths: list[int], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> MambaInputs:
    num_tokens, num_heads = sum(lengths), model.num_heads
    state, batches = states_beyond_caches(lengths, (num_heads, model.head_dim, model.state_dim), device)
    x = torch.randn(num_tokens, num_heads, model.head_dim, dtype=dtype, device=device)
    b, c = (torch.randn(num_tokens, model.num_groups, model.state_dim, dtype=dtype, device=device) for _ in range(2))
    time_steps = TimeSteps(
        torch.randn(num_tokens, num_heads, dtype=dtype, device=device),
        torch.rand(num_heads, device=device) - 2,
        torch.zeros(num_heads, device=device) - 2,
    )
    skip = torch.randn(num_heads, device=device)
    return MambaInputs(x, b, c, time_steps, skip, state, batches)
