"""The gated delta rule: linear attention with a state that decays, and is corrected by each token.

    S   = e^(g_t) S                                a state [key_dim, value_dim] per head, in float32
    S  += k_t beta_t (v_t - S^T k_t)^T
    out = scale S^T q_t

Gated DeltaNet (Yang, Kautz and Hatamizadeh, arXiv:2412.06464) has one decay g per head, Kimi Delta Attention (Kimi
Linear, arXiv:2510.26692) one per key dimension.

    state[slot][head][key_dim][value_dim]          float32; heads are divided over tensor-parallel ranks
"""

from __future__ import annotations

from torch import Tensor

from baton.kernels.state_batch import CHUNK, StateBatch, StateCheckpoint

from . import cpu, reference
from .gate import DeltaDrafts, Gate

__all__ = ["CHUNK", "DeltaDrafts", "Gate", "StateBatch", "StateCheckpoint", "gated_delta"]


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
    """Run the rule over the tokens of `batch`, and return the output of each [T, H, V], in v's dtype.

    q and k are [T, KH, K], v is [T, H, V], all of one dtype. Heads of v are grouped as in attention: head h has the
    queries and keys of head h * KH // H. With `norm_eps`, each head of q and k is first divided by
    `sqrt(sum of squares + norm_eps)`; None leaves them as they are. `gate` has a decay per head, or per head and key
    dimension.

    `state` [slots, H, K, V] float32 is read and written only at the batch's slots (sources, targets, checkpoints). Sums
    are float32; matrix products over chunks have operands in v's dtype. `drafts` stores the inputs of draft tokens, for
    a batch with a `Replay`.

    Tokens may have any stride (views of one tensor); a token's heads are contiguous. On a GPU, K and V must be
    multiples of 16 from 16 to 256. Raises `ValueError` for tensors that do not match.
    """
    _check(q, k, v, gate, state, out)
    _check_drafts(k, v, gate, batch, drafts)
    run = cpu.gated_delta if q.is_cpu else reference.gated_delta
    if q.is_cuda:
        from . import gpu

        run = gpu.gated_delta
    return run(q, k, v, gate, state, batch, scale=scale, norm_eps=norm_eps, drafts=drafts, out=out)


def _check(q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Tensor, out: Tensor | None) -> None:
    num_tokens, num_heads, value_dim = v.shape
    _, num_key_heads, key_dim = q.shape
    if k.shape != q.shape or q.shape[0] != num_tokens or num_heads % num_key_heads:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit each other")
    if state.shape[1:] != (num_heads, key_dim, value_dim) or not state[0].is_contiguous():
        raise ValueError(f"state {list(state.shape)}: give contiguous [{num_heads}, {key_dim}, {value_dim}] a slot")
    gate.check(num_tokens, num_heads, key_dim)
    views = (q, k, v, gate.decay, gate.beta, *(() if out is None else (out,)))
    if num_tokens and not all(view[0].is_contiguous() for view in views):
        raise ValueError("the heads of a token must be contiguous, in q, k, v, gates and out")


def _check_drafts(k: Tensor, v: Tensor, gate: Gate, batch: StateBatch, drafts: DeltaDrafts | None) -> None:
    if (drafts is None) != (batch.replay is None):
        raise ValueError("places of drafts are for batches with a replay, and needed there")
    if drafts is None:
        return
    for places, rows in zip(drafts, (k, v, gate.decay, gate.beta), strict=True):
        alike = places.dtype == rows.dtype and places.stride(0) == drafts.k.stride(0)
        if not alike or places.shape[1:] != rows.shape[1:] or not places[0].is_contiguous():
            raise ValueError(f"places {list(places.shape)} of {places.dtype} for {list(rows.shape)} of {rows.dtype}")
