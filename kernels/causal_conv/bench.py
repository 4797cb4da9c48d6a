"""Benchmark of the causal convolution at the sizes of Qwen3-Next: 8192 channels of q, k and v."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling
from baton.kernels.state_bench import MOST_COPIES, bench_steps

from . import StateBatch, causal_conv

CHANNELS, WIDTH = 8192, 4


@dataclass(frozen=True)
class ConvInputs:
    """A step's tensors, with several inputs that together do not fit in a hardware cache."""

    inputs: list[Tensor]
    weight: Tensor
    state: Tensor
    batch: StateBatch

    def run(self, op: Callable[..., object] = causal_conv, **options: object) -> Callable[[], object]:
        return cycling(lambda x: op(x, self.weight, self.state, self.batch, **options), self.inputs)


def cases(device: torch.device) -> Iterator[BenchCase]:
    for name, lengths in bench_steps(device).items():
        made = step(lengths, device)
        x = made.inputs[0]
        yield BenchCase(
            op="causal_conv",
            shape=name,
            dtype=x.dtype,
            device=device,
            run=made.run(),
            num_bytes=2 * x.nbytes + made.weight.nbytes + 2 * made.state[: len(lengths)].nbytes,
        )


def step(lengths: list[int], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> ConvInputs:
    num_tokens = sum(lengths)
    copies = min(MOST_COPIES, copies_beyond_caches(num_tokens * CHANNELS * dtype.itemsize))
    inputs = [torch.randn(num_tokens, CHANNELS, dtype=dtype, device=device) for _ in range(copies)]
    weight = torch.randn(CHANNELS, WIDTH, dtype=dtype, device=device)
    state = torch.randn(len(lengths), CHANNELS, WIDTH - 1, dtype=dtype, device=device)
    slots = torch.randperm(len(lengths)).tolist()
    return ConvInputs(inputs, weight, state, StateBatch.plan(lengths, slots, slots, device=device))
