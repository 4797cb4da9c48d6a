"""Mamba-2's recurrence chunk by chunk in torch: products of matrices for all heads at once, not a step a token."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.state_batch import StateBatch, carry_states

from .time_steps import SSDDrafts, TimeSteps


def ssd(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    time_steps: TimeSteps,
    state: Tensor,
    batch: StateBatch,
    *,
    skip: Tensor | None = None,
    drafts: SSDDrafts | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `baton.kernels.ssd.ssd`. Computed in float64 where x is, else in float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out

    def advance(current: Tensor, tokens: slice) -> Tensor:
        current, result = _advance(current, x[tokens], b[tokens], c[tokens], time_steps.sliced(tokens), skip)
        out[tokens] = result.to(out.dtype)
        return current

    def replay(current: Tensor, place: int) -> Tensor:
        assert drafts is not None
        one = slice(place, place + 1)
        return _advance(current, drafts.x[one], drafts.b[one], drafts.b[one], time_steps.at(drafts, place), None)[0]

    carry_states(state, batch, dtype, advance, replay=replay)
    if drafts is not None:
        batch.keep_drafts((x, drafts.x), (b, drafts.b), (time_steps.raw, drafts.raw))
    return out


def _advance(
    state: Tensor, x: Tensor, b: Tensor, c: Tensor, time_steps: TimeSteps, skip: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the state [H, P, N] behind the n tokens of a chunk, and what they read of it, [n, H, P]."""
    dtype, n = state.dtype, x.shape[0]
    group = x.shape[1] // b.shape[1]
    writes, reads = (rows.to(dtype).transpose(0, 1) for rows in (b, c))  # [G, n, N]
    values = x.to(dtype).transpose(0, 1)  # [H, n, P]
    dt, log_kept = (rows.T for rows in time_steps.values(dtype))  # [H, n]
    total = log_kept.cumsum(1)
    between = (total[:, :, None] - total[:, None]).masked_fill_(torch.ones(n, n).triu(1).bool(), -torch.inf).exp_()
    weights = (reads @ writes.mT).repeat_interleave(group, 0) * between * dt[:, None]
    writes, reads = (rows.repeat_interleave(group, 0) for rows in (writes, reads))
    result = total.exp()[..., None] * (reads @ state.mT) + weights @ values
    if skip is not None:
        result += skip.to(dtype)[:, None, None] * values
    last = total[:, -1:]
    written = (values * (dt * (last - total).exp())[..., None]).mT @ writes
    return last.exp()[..., None] * state + written, result.transpose(0, 1)
