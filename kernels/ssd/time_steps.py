"""`TimeSteps`: the time step of each token and head, and each head's decay rate. `SSDDrafts`: drafts' stored inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class SSDDrafts(NamedTuple):
    """Stored inputs of draft tokens (`state_batch.Replay`). The stride between places is the same in all tensors."""

    x: Tensor  # [P, H, D]
    b: Tensor  # [P, G, N]
    raw: Tensor  # [P, H], see `TimeSteps`


@dataclass(frozen=True)
class TimeSteps:
    """The time steps of T tokens and H heads, computed in float32 from the outputs of a projection.

    dt = clamp(softplus(raw + bias), *limits)         A = -exp(log_rate)
    """

    raw: Tensor  # [T, H]
    log_rate: Tensor  # [H] float32, `A_log` in checkpoints
    bias: Tensor | None = None  # [H] float32, `dt_bias` in checkpoints
    limits: tuple[float, float] = (0.0, math.inf)  # `time_step_limit` in configs

    def check(self, num_tokens: int, num_heads: int) -> None:
        """Raise `ValueError` for tensors that do not match these numbers of tokens and heads, or for empty limits."""
        bias = None if self.bias is None else list(self.bias.shape)
        if (
            self.raw.shape != (num_tokens, num_heads)
            or self.log_rate.shape != (num_heads,)
            or bias not in (None, [num_heads])
        ):
            raise ValueError(
                f"raw {list(self.raw.shape)}, log_rate {list(self.log_rate.shape)} and bias {bias} for {num_tokens} "
                f"tokens and {num_heads} heads: give raw [T, H], log_rate [H] and bias [H] or None"
            )
        if not 0.0 <= self.limits[0] <= self.limits[1]:
            raise ValueError(
                f"time steps from {self.limits[0]} to {self.limits[1]}: give limits of 0 or more, in order"
            )

    def sliced(self, tokens: slice) -> TimeSteps:
        """Return the time steps of some of the tokens."""
        return replace(self, raw=self.raw[tokens])

    def at(self, drafts: SSDDrafts, place: int) -> TimeSteps:
        """Return the time steps of the draft stored at `place`, as those of one token."""
        return replace(self, raw=drafts.raw[place : place + 1])

    def values(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return dt, and the logarithm of the decay factor, dt A, both [T, H]."""
        raw = self.raw.to(dtype)
        dt = functional.softplus(raw if self.bias is None else raw + self.bias.to(dtype)).clamp(*self.limits)
        return dt, -self.log_rate.to(dtype).exp() * dt
