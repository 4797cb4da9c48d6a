"""The gated delta rule in C++ (`native/gated_delta.cpp`), token by token.

Without a compiler, for float64, or for head dimensions that are not multiples of 16, it is computed in torch, by spans
of tokens: matrix products for all heads at once, instead of one step per token.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.state_batch import StateBatch, carry_states

from .gate import DeltaDrafts, Gate
from .reference import normed

SPAN = 32  # tokens that are computed at once: decays per dimension need SPAN * SPAN * K values per head
GRANULE = 16  # head dimensions must be multiples of this, the width of vectors


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Gate,
    state: Tensor,
    batch: StateBatch,
    *,
    scale: float,
    norm_eps: float | None = 1e-6,
    drafts: DeltaDrafts | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `baton.kernels.gated_delta.gated_delta`."""
    kernel = _kernel()
    if kernel is None or not _fits(q, k, v, gate, state, out):
        return by_spans(q, k, v, gate, state, batch, scale=scale, norm_eps=norm_eps, drafts=drafts, out=out)
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype)
    sizes = _SIZES(
        *(v.shape[1], q.shape[1], q.shape[2], v.shape[2], gate.per_dim),
        *(q.stride(0), k.stride(0), v.stride(0), gate.decay.stride(0), gate.beta.stride(0)),
        *(out.stride(0), state.stride(0), 0 if drafts is None else drafts.k.stride(0)),
    )
    kernel(
        native.DTYPE_NUMBER[q.dtype],
        native.DTYPE_NUMBER[gate.decay.dtype],
        batch.words,
        v.shape[0],
        sizes,
        *(part.data_ptr() for part in (q, k, v, gate.decay, gate.beta)),
        *(0 if part is None else part.data_ptr() for part in (gate.log_rate, gate.bias)),
        state.data_ptr(),
        out.data_ptr(),
        *(0 if part is None else part.data_ptr() for part in drafts or (None,) * 4),
        scale,
        -1.0 if norm_eps is None else norm_eps,
        gate.beta_scale,
        torch.get_num_threads(),
    )
    return out


_SIZES = ctypes.c_int64 * 13  # `DeltaSizes` of native/gated_delta.cpp


def _fits(q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Tensor, out: Tensor | None) -> bool:
    """Return whether the C++ function supports these shapes and dtypes."""
    of_gate = [part for part in (gate.log_rate, gate.bias) if part is not None]
    return (
        q.dtype in native.DTYPE_NUMBER
        and all(part.dtype == q.dtype for part in (k, v, v if out is None else out))
        and gate.decay.dtype in native.DTYPE_NUMBER
        and gate.beta.dtype == gate.decay.dtype
        and all(part.dtype == torch.float32 and part.is_contiguous() for part in of_gate)
        and state.dtype == torch.float32
        and q.shape[2] % GRANULE == 0
        and v.shape[2] % GRANULE == 0
    )


@functools.cache
def _kernel() -> native.NativeFunction | None:
    pointer, integer, numbers = native.POINTER, native.INT, ctypes.POINTER(ctypes.c_int64)
    step = (integer, integer, numbers, native.ROWS, numbers)
    floats = (native.F32, native.F32, native.F32)
    return native.function("baton_gated_delta", *step, *(pointer,) * 13, *floats, integer)


def by_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Gate,
    state: Tensor,
    batch: StateBatch,
    *,
    scale: float,
    norm_eps: float | None = 1e-6,
    drafts: DeltaDrafts | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the rule in torch, in float32 (float64 if q is)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out

    def advance(current: Tensor, tokens: slice) -> Tensor:
        span = _Span(q[tokens], k[tokens], v[tokens], gate.sliced(tokens), dtype, norm_eps)
        current, result = span.advance(current, scale)
        out[tokens] = result.to(out.dtype)
        return current

    def replay(current: Tensor, place: int) -> Tensor:
        assert drafts is not None
        one = slice(place, place + 1)
        span = _Span(drafts.k[one], drafts.k[one], drafts.v[one], gate.at(drafts, place), dtype, norm_eps)
        return span.advance(current, scale)[0]

    carry_states(state, batch, dtype, advance, span=SPAN, replay=replay)
    if drafts is not None:
        batch.keep_drafts((k, drafts.k), (v, drafts.v), (gate.decay, drafts.decay), (gate.beta, drafts.beta))
    return out


class _Span:
    """A few tokens of one sequence, heads first: keys, queries [H, n, K], values [H, n, V], decays [H, n, 1 or K]."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, dtype: torch.dtype, norm_eps: float | None) -> None:
        group = v.shape[1] // q.shape[1]
        queries, keys = (normed(x.to(dtype), norm_eps).transpose(0, 1) for x in (q, k))
        self.queries, self.keys = queries.repeat_interleave(group, 0), keys.repeat_interleave(group, 0)
        self.values = v.to(dtype).transpose(0, 1)
        g, beta = gate.values(dtype)
        self.total = (g if gate.per_dim else g[..., None]).transpose(0, 1).cumsum(1)
        self.beta = beta.T[..., None]

    def advance(self, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the state [H, K, V] after the tokens, and their outputs [n, H, V]."""
        kept = self.total.exp()
        dependence = (self.beta * self._pairs(self.keys)).tril(-1)
        error = self.beta * (self.values - (self.keys * kept) @ state)
        changes = torch.linalg.solve_triangular(dependence, error, upper=False, unitriangular=True)
        result = (self.queries * kept) @ state + self._pairs(self.queries).tril() @ changes
        last = self.total[:, -1:]
        written = (self.keys * (last - self.total).exp()).mT @ changes
        return last.exp().mT * state + written, (result * scale).transpose(0, 1)

    def _pairs(self, rows: Tensor) -> Tensor:
        """Return [H, n, n]: products of each of `rows` with its own and earlier keys, times the decay in between."""
        n = rows.shape[1]
        between = self.total[:, :, None] - self.total[:, None]  # [H, n, n, 1 or K]
        between.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1)[..., None], -torch.inf)
        if between.shape[-1] == 1:
            return (rows @ self.keys.mT) * between[..., 0].exp()
        return torch.einsum("hid,hjd,hijd->hij", rows, self.keys, between.exp())
