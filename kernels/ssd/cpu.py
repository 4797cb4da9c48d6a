"""Mamba-2's recurrence in C++ (`native/ssd.cpp`), token by token.

Without a compiler, for float64, or for odd dimensions, it is computed in torch, chunk by chunk: matrix products for all
heads at once, instead of one step per token.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from baton.kernels import native
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
    """See `baton.kernels.ssd.ssd`."""
    kernel = _kernel()
    if kernel is None or not _fits(x, b, time_steps, state, skip, out):
        return by_chunks(x, b, c, time_steps, state, batch, skip=skip, drafts=drafts, out=out)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    sizes = _SIZES(
        *(x.shape[1], b.shape[1], x.shape[2], b.shape[2]),
        *(x.stride(0), b.stride(0), c.stride(0), time_steps.raw.stride(0), out.stride(0), state.stride(0)),
        0 if drafts is None else drafts.x.stride(0),
    )
    kernel(
        native.DTYPE_NUMBER[x.dtype],
        batch.words,
        x.shape[0],
        sizes,
        *(part.data_ptr() for part in (x, b, c, time_steps.raw, time_steps.log_rate)),
        *(0 if part is None else part.data_ptr() for part in (time_steps.bias, skip)),
        state.data_ptr(),
        out.data_ptr(),
        *(0 if part is None else part.data_ptr() for part in drafts or (None,) * 3),
        *time_steps.limits,
        torch.get_num_threads(),
    )
    return out


_SIZES = ctypes.c_int64 * 11  # `SSDSizes` of native/ssd.cpp


def _fits(x: Tensor, b: Tensor, time_steps: TimeSteps, state: Tensor, skip: Tensor | None, out: Tensor | None) -> bool:
    """Return true for shapes and types that the C++ function covers."""
    numbers = [part for part in (time_steps.log_rate, time_steps.bias, skip) if part is not None]
    return (
        x.dtype in native.DTYPE_NUMBER
        and time_steps.raw.dtype == x.dtype
        and (out is None or out.dtype == x.dtype)
        and all(part.dtype == torch.float32 and part.is_contiguous() for part in (*numbers, state[0]))
        and x.shape[2] % 4 == 0
        and b.shape[2] % 16 == 0
    )


@functools.cache
def _kernel() -> native.NativeFunction | None:
    pointer, numbers = native.POINTER, ctypes.POINTER(ctypes.c_int64)
    step = (native.INT, numbers, native.ROWS, numbers)
    return native.function("baton_ssd", *step, *(pointer,) * 12, native.F32, native.F32, native.INT)


def by_chunks(
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
    """Compute the recurrence in torch, in float32 (float64 if x is)."""
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
    """Return the state [H, P, N] after the n tokens of a chunk, and their outputs [n, H, P]."""
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
