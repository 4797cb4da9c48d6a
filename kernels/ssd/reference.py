"""Reference of Mamba-2's recurrence (Dao and Gu, arXiv:2405.21060): token by token, as it is written down."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.recurrence import carry_states
from baton.kernels.state_batch import StateBatch

from .time_steps import TimeSteps


def ssd(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    time_steps: TimeSteps,
    state: Tensor,
    batch: StateBatch,
    *,
    skip: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `baton.kernels.ssd.ssd`. Computed in float64 where x is, else in float32."""
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    group = x.shape[1] // b.shape[1]
    writes, reads = (rows.to(compute_dtype).repeat_interleave(group, dim=1) for rows in (b, c))
    values, (dt, log_kept) = x.to(compute_dtype), time_steps.values(compute_dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out

    def advance(current: Tensor, tokens: slice) -> Tensor:
        token = tokens.start
        change = torch.einsum("h,hp,hn->hpn", dt[token], values[token], writes[token])
        current = log_kept[token].exp()[:, None, None] * current + change
        result = torch.einsum("hpn,hn->hp", current, reads[token])
        if skip is not None:
            result = result + skip.to(compute_dtype)[:, None] * values[token]
        out[token] = result.to(out.dtype)
        return current

    carry_states(state, batch, compute_dtype, advance, span=1)
    return out
