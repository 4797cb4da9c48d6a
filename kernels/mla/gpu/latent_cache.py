"""RMSNorm of the latent, both rotations and the KV cache write of MLA: one program per token.

Pairs of neighbouring dimensions are read and written together, 16 bytes per thread, and separated in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous


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
    """See `baton.kernels.mla.latent_and_cache`."""
    num_tokens, num_heads, rope = q_rope.shape
    if num_tokens == 0:
        return
    latent_and_cache_kernel[(num_tokens,)](
        q_rope,
        compressed,
        norm,
        cos_sin,
        kv,
        batch.positions,
        batch.slots,
        layer * kv.stride(2),
        kv.stride(0),
        q_rope.stride(0),
        q_rope.stride(1),
        compressed.stride(0),
        num_heads,
        eps,
        RANK=norm.shape[0],
        ROPE=rope,
        HEADS=triton.next_power_of_2(num_heads),
        PAGE=kv.shape[4],
        num_warps=4,
        **launch_options(),
    )


@triton.jit
def latent_and_cache_kernel(
    q_ptr,
    compressed_ptr,
    norm_ptr,
    cos_sin_ptr,
    kv_ptr,
    positions_ptr,
    slots_ptr,
    layer_offset,
    block_stride,
    q_token_stride,
    q_head_stride,
    compressed_stride,
    num_heads,
    eps,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dims, rope_dims = tl.arange(0, RANK), tl.arange(0, ROPE)
    let_next_start()
    # Inputs that no kernel of the step writes are loaded before the projection is ready.
    norm = tl.load(norm_ptr + dims).to(tl.float32)
    slot = tl.load(slots_ptr + token)
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * ROPE
    pairs = tl.arange(0, ROPE // 2)
    cos, sin = tl.load(angles + pairs)[None, :], tl.load(angles + ROPE // 2 + pairs)[None, :]
    wait_for_previous()

    row = compressed_ptr + token * compressed_stride
    latent = tl.load(row + dims).to(tl.float32)
    key = tl.load(row + RANK + rope_dims)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    queries = q_ptr + token * q_token_stride + head * q_head_stride + rope_dims[None, :]
    query = tl.load(queries, mask=head < num_heads)
    tl.store(queries, _turned(query, cos, sin), mask=head < num_heads)
    if slot >= 0:
        target = kv_ptr + layer_offset + slot // PAGE * block_stride + slot % PAGE * (RANK + ROPE)
        latent *= tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps) * norm
        tl.store(target + dims, latent)
        tl.store(target + RANK + rope_dims[None, :], _turned(key, cos, sin))


@triton.jit
def _turned(values, cos, sin):
    """Rotate values [rows, ROPE] in float32: each even dimension and the next one are a pair."""
    ROWS: tl.constexpr = values.shape[0]
    ROPE: tl.constexpr = values.shape[1]
    first, second = tl.split(tl.reshape(values.to(tl.float32), [ROWS, ROPE // 2, 2]))
    return tl.reshape(tl.join(first * cos - second * sin, second * cos + first * sin), [ROWS, ROPE])
