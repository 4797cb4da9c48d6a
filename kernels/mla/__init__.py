"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over pages of latents.

    kv[block][0][layer][0][token] = latent [rank], normed | rotated part of the key [rope]

One vector per token and layer serves all heads. Attention reads a tenth of the bytes of keys and values.
"""

from __future__ import annotations

from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch

from . import cpu, reference
from .up_projection import MAX_EXPANDED_TOKENS, MOST_TILED_TOKENS, UpProjection

__all__ = [
    "MAX_EXPANDED_TOKENS",
    "MOST_TILED_TOKENS",
    "AttentionBatch",
    "UpProjection",
    "latent_and_cache",
    "mla_attention",
    "prepare",
]


def prepare(batch: AttentionBatch, *, num_heads: int, head_dim: int) -> AttentionBatch:
    """Return `batch` with the plan that all layers of the step share. Only launches kernels, so a
    CUDA graph may capture it.
    """
    if not batch.seq_lens.is_cuda:
        return batch
    from . import gpu

    return gpu.prepare(batch, num_heads=num_heads, head_dim=head_dim)


def latent_and_cache(
    q_rope: Tensor,
    compressed: Tensor,
    norm: Tensor,
    cos_sin: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    *,
    eps: float,
) -> None:
    """Rotate q_rope [T, H, rope] in place, and write each token's latent and key part to its slot of `layer` in kv.

    compressed [T, rank + rope] is the output of the down-projection: the latent, which is normed (RMSNorm with `norm`
    [rank] and `eps`), and the shared part of the key, which is rotated. Dimensions 2i and 2i + 1 are a pair.
    `cos_sin` [max_positions, rope] float32 has cosines, then sines. Computed in float32, rounded once. Tokens of slot
    -1 write nothing. q_rope and compressed may be views with a contiguous last dimension.
    """
    if not compressed.is_cuda:
        reference.latent_and_cache(q_rope, compressed, norm, cos_sin, kv, layer, batch, eps=eps)
        return
    from . import gpu

    gpu.latent_and_cache(q_rope, compressed, norm, cos_sin, kv, layer, batch, eps=eps)


def mla_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    up: UpProjection,
    *,
    scale: float,
) -> Tensor:
    """Compute causal attention of q [T, H, nope + rope] -> [T, H, value].

    It reads `layer` of kv [blocks, 1, layers, 1, block_size, rank + rope]. A token's key for head h is `up`'s
    projection [nope] of its latent, concatenated with the shared [rope]; its value is `up`'s projection [value] of the
    latent. A query sees the keys up to its own position. Sums are float32. The latents of the step's own tokens must
    already be in the cache; blocks past a sequence's end are not read. On a GPU, `batch` must come from `prepare`, and
    ranks and rope parts must be powers of two.
    """
    if not q.is_cuda:
        return cpu.mla_attention(q, kv, layer, batch, up, scale=scale)
    from . import gpu

    return gpu.mla_attention(q, kv, layer, batch, up, scale=scale)
