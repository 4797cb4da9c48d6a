"""Steps of Mamba-2 layers for the tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baton.kernels.ssd import StateBatch, TimeSteps, reference

from .kernel_checks import assert_as_accurate, tf32x3_slack
from .state_cases import StateCase, assert_others_untouched, written_slots


@dataclass(frozen=True)
class Sizes:
    heads: int = 4
    groups: int = 2
    head_dim: int = 32
    state_dim: int = 32


SMALL = Sizes()


@dataclass(frozen=True)
class SSDStep:
    x: Tensor
    b: Tensor
    c: Tensor
    time_steps: TimeSteps
    state: Tensor
    batch: StateBatch
    skip: Tensor | None

    def run(self, op: Callable[..., Tensor], **options: object) -> tuple[Tensor, Tensor]:
        """Return an op's output and the states after it."""
        state = self.state.clone()
        out = op(self.x, self.b, self.c, self.time_steps, state, self.batch, skip=self.skip, **options)
        return out, state

    def sliced(self, tokens: slice, batch: StateBatch) -> SSDStep:
        """Return some of the tokens as a step of their own."""
        x, b, c = (rows[tokens] for rows in (self.x, self.b, self.c))
        return replace(self, x=x, b=b, c=c, time_steps=self.time_steps.sliced(tokens), batch=batch)

    def converted(self, dtype: torch.dtype) -> SSDStep:
        steps = self.time_steps
        bias = None if steps.bias is None else steps.bias.to(dtype)
        time_steps = TimeSteps(steps.raw.to(dtype), steps.log_rate.to(dtype), bias, steps.limits)
        x, b, c, state = (part.to(dtype) for part in (self.x, self.b, self.c, self.state))
        skip = None if self.skip is None else self.skip.to(dtype)
        return replace(self, x=x, b=b, c=c, time_steps=time_steps, state=state, skip=skip)

    @property
    def written(self) -> list[int]:
        return written_slots(self.batch)

    def check(self, op: Callable[..., Tensor], slack: float = 4.0, **options: object) -> None:
        """Check that results are as accurate as this precision allows, and that only the target slots change."""
        slack *= tf32x3_slack(self.x)
        out, state = self.run(op, **options)
        exact, exact_state = self.converted(torch.float64).run(reference.ssd)
        same, same_state = self.run(reference.ssd)
        assert_as_accurate(out, exact, same, slack, terms=4.0)
        slots = self.written
        terms = torch.finfo(self.x.dtype).eps / torch.finfo(torch.float32).eps * 16  # operands of products are rounded
        assert_as_accurate(state[slots], exact_state[slots], same_state[slots], slack, terms=terms)
        assert_others_untouched(state, self.state, self.batch)


def ssd_step(
    query_lens: Sequence[int],
    device: torch.device,
    *,
    sizes: Sizes = SMALL,
    dtype: torch.dtype = torch.float32,
    with_bias: bool = True,
    with_skip: bool = True,
    limits: tuple[float, float] = (0.0, math.inf),
    log_rate: float | None = None,
    seed: int = 0,
    **case: Any,
) -> SSDStep:
    """Draw a step; other keyword arguments are passed on to `StateCase`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    num_tokens, heads = sum(query_lens), sizes.heads
    state, batch = StateCase(query_lens, **case).draw((heads, sizes.head_dim, sizes.state_dim), generator, device)
    x = draw(num_tokens, heads, sizes.head_dim)
    b, c = (draw(num_tokens, sizes.groups, sizes.state_dim) for _ in range(2))
    rates = draw(heads) if log_rate is None else torch.full((heads,), log_rate)
    bias, skip = draw(heads) - 2, draw(heads)
    time_steps = TimeSteps(
        draw(num_tokens, heads).to(device, dtype),
        rates.to(device),
        bias.to(device) if with_bias else None,
        limits,
    )
    x, b, c = (rows.to(device, dtype) for rows in (x, b / sizes.state_dim**0.5, c))
    return SSDStep(x, b, c, time_steps, state, batch, skip.to(device) if with_skip else None)
