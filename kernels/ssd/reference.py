"""Reference of Mamba-2's recurrence (Dao and Gu, arXiv:2405.21060), token by token as in the paper."""

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
    """See `baton.kernels.ssd.ssd`. Computes in float32 (float64 if x is)."""
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    group = x.shape[1] // b.shape[1]
    reads = c.to(compute_dtype).repeat_interleave(group, dim=1)
    values = x.to(compute_dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out

    def changed(current: Tensor, value: Tensor, writes: Tensor, steps: TimeSteps) -> Tensor:
        """Return the state after one token; `steps` has the time steps of that token only."""
        dt, log_kept = (each[0] for each in steps.values(compute_dtype))
        writes = writes.to(compute_dtype).repeat_interleave(group, dim=0)
        change = torch.einsum("h,hp,hn->hpn", dt, value.to(compute_dtype), writes)
        return log_kept.exp()[:, None, None] * current + change

    def advance(current: Tensor, tokens: slice) -> Tensor:
        token = tokens.start
        current = changed(current, x[token], b[token], time_steps.sliced(tokens))
        result = torch.einsum("hpn,hn->hp", current, reads[token])
        if skip is not None:
            result = result + skip.to(compute_dtype)[:, None] * values[token]
        out[token] = result.to(out.dtype)
        return current

    def replay(current: Tensor, place: int) -> Tensor:
        assert drafts is not None
        return changed(current, drafts.x[place], drafts.b[place], time_steps.at(drafts, place))

    carry_states(state, batch, compute_dtype, advance, span=1, replay=replay)
    if drafts is not None:
        batch.keep_drafts((x, drafts.x), (b, drafts.b), (time_steps.raw, drafts.raw))
    return out
