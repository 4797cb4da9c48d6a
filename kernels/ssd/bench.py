"""Mamba-2's recurrence at the sizes of Nemotron-H, and of Granite-4 with its one group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling

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
SMALL_STEPS = {"decode 1": [1], "prefill 1 x 256": [256]}  # tokens of each sequence
LARGE_STEPS = {
    "decode 1": [1],
    "decode 64": [1] * 64,
    "decode 256": [1] * 256,
    "prefill 1 x 1k": [1024],
    "prefill 16 x 4k": [4096] * 16,
    "prefill 2 x 32k": [32768] * 2,
}


@dataclass(frozen=True)
class MambaInputs:
    """A step's tensors. There are as many states as no cache holds, and a batch for each share of the slots."""

    x: Tensor
    b: Tensor
    c: Tensor
    time_steps: TimeSteps
    skip: Tensor
    state: Tensor
    batches: list[StateBatch]

    @property
    def num_bytes(self) -> int:
        """Bytes of what goes in and comes out, states aside."""
        return sum(rows.nbytes for rows in (self.x, self.x, self.b, self.c, self.time_steps.raw))

    def run(self, op: Callable[..., object] = ssd, **options: object) -> Callable[[], object]:
        def once(batch: StateBatch) -> object:
            return op(self.x, self.b, self.c, self.time_steps, self.state, batch, skip=self.skip, **options)

        return cycling(once, self.batches)


def cases(device: torch.device) -> Iterator[BenchCase]:
    steps = LARGE_STEPS if device.type == "cuda" else SMALL_STEPS
    for model, (name, lengths) in itertools.product((NEMOTRON_H, GRANITE_4), steps.items()):
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
    """Return the FLOP of both products with states, and of what is causal inside of chunks."""
    states = 2 * model.num_heads * model.head_dim * model.state_dim
    chunks = CHUNK / 2 * (model.num_heads * model.head_dim + model.num_groups * model.state_dim)
    return 2.0 * num_tokens * (states + chunks)


def step(
    model: MambaModel, lengths: list[int], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> MambaInputs:
    num_tokens, num_seqs, num_heads = sum(lengths), len(lengths), model.num_heads
    copies = min(64, copies_beyond_caches(model.state_bytes * num_seqs))
    state = torch.randn(copies * num_seqs, num_heads, model.head_dim, model.state_dim, device=device)
    slots = torch.randperm(len(state)).view(copies, num_seqs).tolist()
    x = torch.randn(num_tokens, num_heads, model.head_dim, dtype=dtype, device=device)
    b, c = (torch.randn(num_tokens, model.num_groups, model.state_dim, dtype=dtype, device=device) for _ in range(2))
    time_steps = TimeSteps(
        torch.randn(num_tokens, num_heads, dtype=dtype, device=device),
        torch.rand(num_heads, device=device) - 2,
        torch.zeros(num_heads, device=device) - 2,
    )
    skip = torch.randn(num_heads, device=device)
    batches = [StateBatch.plan(lengths, of_copy, of_copy, device=device) for of_copy in slots]
    return MambaInputs(x, b, c, time_steps, skip, state, batches)
