"""The gated delta rule chunk by chunk in torch: products of matrices for all heads at once, not a step a token."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.state_batch import StateBatch, carry_states

from .gate import DeltaDrafts, Gate
from .reference import normed

SPAN = 32  # tokens that are taken at once: decays a dimension take SPAN * SPAN * K values a head


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
    """See `baton.kernels.gated_delta.gated_delta`. Computed in float64 where q is, else in float32."""
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
    """A few tokens of one sequence, heads first: keys and queries [H, n, K], values [H, n, V], G [H, n, 1 or K]."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, dtype: torch.dtype, norm_eps: float | None) -> None:
        group = v.shape[1] // q.shape[1]
        queries, keys = (normed(x.to(dtype), norm_eps).transpose(0, 1) for x in (q, k))
        self.queries, self.keys = queries.repeat_interleave(group, 0), keys.repeat_interleave(group, 0)
        self.values = v.to(dtype).transpose(0, 1)
        g, beta = gate.values(dtype)
        self.total = (g if gate.per_dim else g[..., None]).transpose(0, 1).cumsum(1)
        self.beta = beta.T[..., None]

    def advance(self, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the state [H, K, V] behind the tokens, and what they read of it, [n, H, V]."""
        kept = self.total.exp()
        dependence = (self.beta * self._pairs(self.keys)).tril(-1)
        error = self.beta * (self.values - (self.keys * kept) @ state)
        changes = torch.linalg.solve_triangular(dependence, error, upper=False, unitriangular=True)
        result = (self.queries * kept) @ state + self._pairs(self.queries).tril() @ changes
        last = self.total[:, -1:]
        written = (self.keys * (last - self.total).exp()).mT @ changes
        return last.exp().mT * state + written, (result * scale).transpose(0, 1)

    def _pairs(self, rows: Tensor) -> Tensor:
        """Return [H, n, n]: each of `rows` times each key before it or with it, decayed in between."""
        n = rows.shape[1]
        between = self.total[:, :, None] - self.total[:, None]  # [H, n, n, 1 or K]
        between.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1)[..., None], -torch.inf)
        if between.shape[-1] == 1:
            return (rows @ self.keys.mT) * between[..., 0].exp()
        return torch.einsum("hid,hjd,hijd->hij", rows, self.keys, between.exp())
