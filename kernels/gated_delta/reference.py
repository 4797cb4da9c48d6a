"""Reference of the gated delta rule (Yang, Kautz and Hatamizadeh, arXiv:2412.06464; a decay for each key dimension:
Kimi Linear, arXiv:2510.26692): token by token, as it is written down.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.recurrence import carry_states
from baton.kernels.state_batch import StateBatch

from .gate import Gate


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
    out: Tensor | None = None,
) -> Tensor:
    """See `baton.kernels.gated_delta.gated_delta`. Computed in float64 where q is, else in float32."""
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    group = v.shape[1] // q.shape[1]
    q, k = (normed(x.to(compute_dtype), norm_eps).repeat_interleave(group, dim=1) for x in (q, k))
    values, (g, beta) = v.to(compute_dtype), gate.values(compute_dtype)
    decay = g.exp() if gate.per_dim else g.exp()[..., None]  # [T, H, K or 1]
    out = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out

    def advance(current: Tensor, tokens: slice) -> Tensor:
        token = tokens.start
        current = decay[token][..., None] * current
        predicted = torch.einsum("hkv,hk->hv", current, k[token])
        change = beta[token][:, None] * (values[token] - predicted)
        current = current + k[token][..., None] * change[:, None]
        out[token] = (torch.einsum("hkv,hk->hv", current, q[token]) * scale).to(out.dtype)
        return current

    carry_states(state, batch, compute_dtype, advance, span=1)
    return out


def normed(x: Tensor, eps: float | None) -> Tensor:
    """Divide each head by its Euclidean length; x itself where eps is None."""
    return x if eps is None else x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
