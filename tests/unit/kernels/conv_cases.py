"""Convolutions of ragged sequences for the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baton.kernels.causal_conv import StateBatch, reference

from .kernel_checks import assert_as_accurate
from .state_cases import StateCase, assert_same_states


@dataclass(frozen=True)
class ConvStep:
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    batch: StateBatch
    silu: bool = True

    def run(self, op: Callable[..., Tensor], **options: object) -> tuple[Tensor, Tensor]:
        state = self.state.clone()
        out = op(self.x, self.weight, state, self.batch, bias=self.bias, silu=self.silu, **options)
        return out, state

    def check(self, op: Callable[..., Tensor], **options: object) -> None:
        """Check that outputs are as accurate as the reference in the same precision, and states equal bit for bit."""
        out, state = self.run(op, **options)
        same, same_state = self.run(reference.causal_conv)
        bias = None if self.bias is None else self.bias.double()
        wide = replace(self, x=self.x.double(), weight=self.weight.double(), state=self.state.double(), bias=bias)
        assert_as_accurate(out, wide.run(reference.causal_conv)[0], same, slack=4.0)
        assert_same_states(state, same_state)


def conv_step(
    query_lens: Sequence[int],
    device: torch.device,
    *,
    channels: int = 80,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    with_bias: bool = True,
    **case: Any,
) -> ConvStep:
    """Draw a step; other keyword arguments are passed on to `StateCase`."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(query_lens)
    state, batch = StateCase(query_lens, **case).draw((channels, width - 1), generator, device, dtype)
    wide = torch.randn(num_tokens, channels + 16, generator=generator).to(device, dtype)
    weight = torch.randn(channels, width, generator=generator).to(device, dtype)
    bias = torch.randn(channels, generator=generator).to(device, dtype) if with_bias else None
    return ConvStep(wide[:, 8 : 8 + channels], weight, bias, state, batch)
