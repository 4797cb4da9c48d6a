"""Reference of the gated delta rule, token by token as in the papers.

Yang, Kautz and Hatamizadeh, arXiv:2412.06464; with a decay per key dimension, Kimi Linear, arXiv:2510.26692.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.state_batch import StateBatch, carry_states

from .gate import DeltaDrafts, Gate


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
    """See `baton.kernels.gated_delta.gated_delta`. Computes in float32 (float64 if q is)."""
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    group = v.shape[1] // q.shape[1]
    out = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out

    def wide(heads: Tensor) -> Tensor:
        return normed(heads.to(compute_dtype), norm_eps).repeat_interleave(group, dim=0)

    def changed(current: Tensor, key: Tensor, value: Tensor, gates: Gate) -> Tensor:
        """Return the state after one token; `gates` has the gates of that token only."""
        g, beta = (each[0] for each in gates.values(compute_dtype))
        decay, key = g.exp() if gate.per_dim else g.exp()[..., None], wide(key)  # [H, K or 1], [H, K]
        current = decay[..., None] * current
        predicted = torch.einsum("hkv,hk->hv", current, key)
        change = beta[:, None] * (value.to(compute_dtype) - predicted)
        return current + key[..., None] * change[:, None]

    def advance(current: Tensor, tokens: slice) -> Tensor:
        token = tokens.start
        current = changed(current, k[token], v[token], gate.sliced(tokens))
        out[token] = (torch.einsum("hkv,hk->hv", current, wide(q[token])) * scale).to(out.dtype)
        return current

    def replay(current: Tensor, place: int) -> Tensor:
        assert drafts is not None
        return changed(current, drafts.k[place], drafts.v[place], gate.at(drafts, place))

    carry_states(state, batch, compute_dtype, advance, span=1, replay=replay)
    if drafts is not None:
        batch.keep_drafts((k, drafts.k), (v, drafts.v), (gate.decay, drafts.decay), (gate.beta, drafts.beta))
    return out


def normed(x: Tensor, eps: float | None) -> Tensor:
    """Divide each head by its Euclidean length; return x itself if eps is None."""
    return x if eps is None else x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
