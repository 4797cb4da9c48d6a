"""Reference of Mamba-2's recurrence (Dao and Gu, arXiv:2405.21060): token by token, as it is written down."""

from __future__ import annotations

import torch
from torch import Tensor

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
    kept = checkpoint_slots(batch)
    starts = batch.query_start.tolist()
    for seq, (source, target) in enumerate(zip(batch.sources.tolist(), batch.targets.tolist(), strict=True)):
        current = initial_state(state, source, compute_dtype)
        for token in range(starts[seq], starts[seq + 1]):
            change = torch.einsum("h,hp,hn->hpn", dt[token], values[token], writes[token])
            current = log_kept[token].exp()[:, None, None] * current + change
            result = torch.einsum("hpn,hn->hp", current, reads[token])
            if skip is not None:
                result = result + skip.to(compute_dtype)[:, None] * values[token]
            out[token] = result.to(out.dtype)
            if token + 1 in kept:
                state[kept[token + 1]] = current.to(state.dtype)
        if target >= 0 and starts[seq + 1] > starts[seq]:
            state[target] = current.to(state.dtype)
    return out


def initial_state(state: Tensor, source: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(state.shape[1:], dtype=dtype, device=state.device) if source < 0 else state[source].to(dtype)


def checkpoint_slots(batch: StateBatch) -> dict[int, int]:
    """Return the slot of each checkpoint by the token that follows it."""
    ends = batch.chunk_start.tolist()[1:]
    return {end: slot for end, slot in zip(ends, batch.checkpoints.tolist(), strict=True) if slot >= 0}
