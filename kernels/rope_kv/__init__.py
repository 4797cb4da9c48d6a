"""Head norm, rotary position embedding and the write into the KV cache, fused."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch

from . import cpu, reference

__all__ = ["rope_and_cache"]


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    *,
    rotary_dim: int | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Rotate q [T, H, D] in place, write k [T, KV, D] and v [T, KV, width of a value] to the batch's
    slots of `layer` in kv (see `kernels.kv_rows`), and return q.

    Each head of q and k is normalised (RMSNorm with `q_norm`, `k_norm` [D], both of q's dtype or float32, and `eps`,
    where given) and rotated (Su et al., arXiv:2104.09864; dimension i against i + rotary_dim / 2, those from rotary_dim
    on stay). `cos_sin` [max_positions, 2 n] float32: the cosines of the first n pairs, then their sines; other pairs
    stay, too. Without a `rotary_dim` it is 2 n: there are no others. Computed in float32, rounded once.
    q, k and v may be views into one tensor: only their last two dimensions must be contiguous.

    A cache narrower than k and v holds `k / k_scale` and `v / v_scale` (float32, one element), rounded to nearest and
    no larger than its type goes. Tokens of slot -1 are not written, and nothing is where k and v have no heads: their
    layer reads those of another. What k holds afterwards is not defined: kv has it.
    """
    run = cpu.rope_and_cache if q.is_cpu else reference.rope_and_cache
    if q.is_cuda:
        from . import gpu

        run = gpu.rope_and_cache
    return run(
        q,
        k,
        v,
        cos_sin,
        kv,
        layer,
        batch,
        rotary_dim=rotary_dim,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        k_scale=k_scale,
        v_scale=v_scale,
    )
