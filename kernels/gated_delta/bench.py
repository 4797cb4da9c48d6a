"""Benchmark of the gated delta rule at the sizes of Qwen3-Next and Qwen3.5, and of Kimi-Linear."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.roofline import BenchCase, cycling
from baton.kernels.state_bench import bench_steps, states_beyond_caches

from . import CHUNK, Gate, StateBatch, gated_delta


@dataclass(frozen=True)
class DeltaModel:
    name: str
    num_key_heads: int
    num_heads: int
    per_dim: bool
    dim: int = 128  # of keys and of values

    @property
    def state_bytes(self) -> int:
        return 4 * self.num_heads * self.dim**2


GDN, KDA = DeltaModel("GDN", 16, 32, per_dim=False), DeltaModel("KDA", 32, 32, per_dim=True)


@dataclass(frozen=True)
class DeltaInputs:
    """A step's tensors: more states than fit in a hardware cache, and several batches, each with its own slots."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Gate
    state: Tensor
    batches: list[StateBatch]

    def run(self, op: Callable[..., object] = gated_delta, **options: object) -> Callable[[], object]:
        scale = self.q.shape[2] ** -0.5

        def once(batch: StateBatch) -> object:
            return op(self.q, self.k, self.v, self.gate, self.state, batch, scale=scale, **options)

        return cycling(once, self.batches)


def cases(device: torch.device) -> Iterator[BenchCase]:
    for model, (name, lengths) in itertools.product((GDN, KDA), bench_steps(device).items()):
        made = step(model, lengths, device)
        num_tokens = sum(lengths)
        activations = sum(x.numel() for x in (made.q, made.k, made.v, made.v, made.gate.decay, made.gate.beta))
        yield BenchCase(
            op="gated_delta",
            shape=f"{model.name} {name}",
            dtype=made.q.dtype,
            device=device,
            run=made.run(),
            num_bytes=2 * model.state_bytes * len(lengths) + activations * made.q.element_size(),
            flop=flop(model, num_tokens) if max(lengths) > 1 else 0.0,
        )


def flop(model: DeltaModel, num_tokens: int) -> float:
    """Return the FLOP of all products with states, and of the causal half of products within chunks."""
    states = 3 * model.num_heads * model.dim**2
    chunks = CHUNK * model.dim * (model.num_heads + model.num_key_heads)
    return 2.0 * num_tokens * (states + chunks)


def step(
    model: DeltaModel, lengths: list[int], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> DeltaInputs:
    num_tokens = sum(lengths)
    state, batches = states_beyond_caches(lengths, (model.num_heads, model.dim, model.dim), device)
    gates = (model.num_heads, model.dim) if model.per_dim else (model.num_heads,)
    q, k = (torch.randn(num_tokens, model.num_key_heads, model.dim, dtype=dtype, device=device) for _ in range(2))
    v = torch.randn(num_tokens, model.num_heads, model.dim, dtype=dtype, device=device)
    gate = Gate(
        torch.randn(num_tokens, *gates, dtype=dtype, device=device),
        torch.randn(num_tokens, model.num_heads, dtype=dtype, device=device),
        torch.rand(model.num_heads, device=device) - 2,
        torch.zeros(gates, device=device),
    )
    return DeltaInputs(q, k, v, gate, state, batches)
