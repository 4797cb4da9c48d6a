"""Steps of the gated delta rule for the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baton.kernels.gated_delta import Gate, StateBatch, reference

from .kernel_checks import assert_as_accurate, tf32x3_slack
from .state_cases import StateCase, assert_others_untouched, written_slots

SCALE = 0.3


@dataclass(frozen=True)
class Heads:
    keys: int = 2
    values: int = 4
    key_dim: int = 32
    value_dim: int = 32


SMALL = Heads()


@dataclass(frozen=True)
class DeltaStep:
    q: Tensor
    k: Tensor
    v: Tensor
    gate: Gate
    state: Tensor
    batch: StateBatch
    norm_eps: float | None = 1e-6

    def run(self, op: Callable[..., Tensor], **options: object) -> tuple[Tensor, Tensor]:
        """Return an op's output and the states after it."""
        state = self.state.clone()
        out = op(self.q, self.k, self.v, self.gate, state, self.batch, scale=SCALE, norm_eps=self.norm_eps, **options)
        return out, state

    def converted(self, dtype: torch.dtype) -> DeltaStep:
        parts = {name: part.to(dtype) for name, part in vars(self.gate).items() if isinstance(part, Tensor)}
        gate = replace(self.gate, **parts)  # type: ignore[arg-type]
        q, k, v, state = (part.to(dtype) for part in (self.q, self.k, self.v, self.state))
        return replace(self, q=q, k=k, v=v, state=state, gate=gate)

    @property
    def written(self) -> list[int]:
        return written_slots(self.batch)

    def check(self, op: Callable[..., Tensor], slack: float = 4.0, **options: object) -> None:
        """Check that results are as accurate as this precision allows, and that only the target slots change."""
        slack *= tf32x3_slack(self.q)
        out, state = self.run(op, **options)
        exact, exact_state = self.converted(torch.float64).run(reference.gated_delta)
        same, same_state = self.run(reference.gated_delta)
        assert_as_accurate(out, exact, same, slack, terms=4.0)
        slots = self.written
        terms = torch.finfo(self.q.dtype).eps / torch.finfo(torch.float32).eps * 100  # the errors of decays add up
        assert_as_accurate(state[slots], exact_state[slots], same_state[slots], slack, terms=terms)
        assert_others_untouched(state, self.state, self.batch)


def delta_step(
    query_lens: Sequence[int],
    device: torch.device,
    *,
    heads: Heads = SMALL,
    dtype: torch.dtype = torch.float32,
    per_dim: bool = False,
    raw_gate: bool = True,
    beta_scale: float = 1.0,
    norm_eps: float | None = 1e-6,
    strength: float = 1.0,
    seed: int = 0,
    **case: Any,
) -> DeltaStep:
    """Draw a step; other keyword arguments are passed on to `StateCase`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    num_tokens = sum(query_lens)
    shape = (heads.values, heads.key_dim, heads.value_dim)
    state, batch = StateCase(query_lens, **case).draw(shape, generator, device)
    q, k = (draw(num_tokens, heads.keys, heads.key_dim) for _ in range(2))
    if norm_eps is None:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    gates = (heads.values, heads.key_dim) if per_dim else (heads.values,)
    if raw_gate:
        gate = Gate(draw(num_tokens, *gates), draw(num_tokens, heads.values), draw(heads.values), draw(*gates))
    else:
        gate = Gate(-strength * draw(num_tokens, *gates).abs(), draw(num_tokens, heads.values).sigmoid())
    decay, beta = gate.decay.to(device, dtype), gate.beta.to(device, dtype)
    if not raw_gate:
        decay, beta = gate.decay.to(device), gate.beta.to(device)
    log_rate, bias = (None if part is None else part.to(device) for part in (gate.log_rate, gate.bias))
    v = draw(num_tokens, heads.values, heads.value_dim)
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    return DeltaStep(q, k, v, Gate(decay, beta, log_rate, bias, beta_scale), state, batch, norm_eps)
