"""Head norm, rotation and KV write in Triton, with one launch for the heads of q, k and v.

    program (t, g)      token t; g counts groups of HEADS heads:   q q q q | k | v
                        q: norm, rotate, back to q      k: norm, rotate, to its slot      v: to its slot

A head is read in three parts: the first half of the rotated dimensions, the second half, and the unrotated rest. So
both dimensions of a pair are in the same thread's registers.

Inputs that the previous kernel does not write (positions, slots, angles, norms) are read while it still runs. A step's
positions and slots are complete before its first layer, since there are normally launched kernels in between (`pdl`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import pdl
from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.kv_rows import KVRows, kv_rows

MANY_TOKENS = 256  # from here on, a program takes more heads, so that a token's angles are read less often
FEW, MANY = (8, 2), (16, 1)  # heads and warps of a program, with few tokens and with many
FIRST, SECOND, BEHIND = (tl.constexpr(part) for part in range(3))  # parts of a head: two rotated halves, and the rest


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
    """See `baton.kernels.rope_kv.rope_and_cache`. Raises `ValueError` for tensors that do not match."""
    num_tokens, num_heads, dim = q.shape
    num_kv_heads, rotary_dim = k.shape[1], rotary_dim or cos_sin.shape[1]
    block_size = kv.shape[4]
    rows = kv_rows(kv, dim)
    _check(q, k, v, cos_sin, rotary_dim, kv, rows)
    if num_tokens == 0:
        return q
    heads, num_warps = FEW if num_tokens < MANY_TOKENS else MANY
    kv_heads = min(heads, triton.next_power_of_2(max(1, num_kv_heads)))
    planes = kv[:, :, layer]
    rope_and_cache_kernel[(num_tokens, triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, kv_heads))](
        q,
        k,
        v,
        q_norm,
        k_norm,
        cos_sin,
        planes,
        batch.positions,
        batch.slots,
        k_scale,
        v_scale,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        *planes.stride()[:2],
        rows.to_value,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        DIM=dim,
        VALUE_DIM=rows.value_dim,
        TOKEN_STRIDE=rows.token_stride,
        HALF=rotary_dim // 2,
        TURNING=cos_sin.shape[1] // 2,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        num_warps=num_warps,
        **pdl.launch_options(),
    )
    return q


def _check(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, rotary_dim: int, kv: Tensor, rows: KVRows) -> None:
    dim = q.shape[2]
    value_shape = (*k.shape[:2], rows.value_dim)
    if v.shape != value_shape or k.shape[::2] != q.shape[::2] or k.shape[1] not in (0, kv.shape[1]):
        shapes = (list(tensor.shape) for tensor in (q, k, v, kv))
        raise ValueError("q {}, k {}, v {} and kv {} do not fit each other".format(*shapes))
    row_strides = (rows.token_stride, 1)
    if any(heads.stride()[1:] != (heads.shape[2], 1) for heads in (q, k, v)) or kv.stride()[4:] != row_strides:
        raise ValueError("the heads of q, k and v and the tokens of kv must be contiguous")
    if cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous() or not cos_sin.shape[1] <= rotary_dim <= dim:
        raise ValueError(
            f"cos_sin is {cos_sin.dtype} {list(cos_sin.shape)} for {rotary_dim} dimensions: give contiguous float32 of "
            f"at most so many, of {dim}"
        )


@triton.jit
def rope_and_cache_kernel(
    q,  # [num_tokens, NUM_HEADS, DIM], tokens q_stride apart
    k,  # [num_tokens, NUM_KV_HEADS, DIM], tokens k_stride apart
    v,  # [num_tokens, NUM_KV_HEADS, VALUE_DIM], tokens v_stride apart
    q_norm,  # [DIM] or None
    k_norm,  # [DIM] or None
    cos_sin,  # [positions, 2 * TURNING] float32
    planes,  # this layer of kv: see `kernels.kv_rows`
    positions,  # [num_tokens] int64
    slots,  # [num_tokens] int64
    k_scale,  # [1] float32 or None: what is kept is k / k_scale
    v_scale,
    q_stride,
    k_stride,
    v_stride,
    block_stride,
    head_stride,
    to_value,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    TURNING: tl.constexpr,  # pairs of HALF that do turn
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # of q that a program takes
    KV_HEADS: tl.constexpr,  # of k or v
):
    pdl.let_next_start()
    q_groups: tl.constexpr = triton.cdiv(NUM_HEADS, HEADS)
    kv_groups: tl.constexpr = triton.cdiv(NUM_KV_HEADS, KV_HEADS)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    if group < q_groups:
        heads = group * HEADS + tl.arange(0, HEADS)
        rows = q + token * q_stride
        angles = _angles(cos_sin + tl.load(positions + token) * (2 * TURNING), TURNING, HALF)
        weight = _weight(q_norm, DIM, HALF)
        pdl.wait_for_previous()
        parts = _load(rows, heads, NUM_HEADS, DIM, HALF)
        parts = _rotate(_norm(parts, weight, eps, DIM), angles)
        _store(rows, DIM, heads, NUM_HEADS, parts, None, DIM, HALF)
    else:
        slot = tl.load(slots + token)
        place = planes + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * TOKEN_STRIDE
        if slot >= 0:
            if group < q_groups + kv_groups:
                heads = (group - q_groups) * KV_HEADS + tl.arange(0, KV_HEADS)
                angles = _angles(cos_sin + tl.load(positions + token) * (2 * TURNING), TURNING, HALF)
                weight = _weight(k_norm, DIM, HALF)
                pdl.wait_for_previous()
                parts = _load(k + token * k_stride, heads, NUM_KV_HEADS, DIM, HALF)
                parts = _rotate(_norm(parts, weight, eps, DIM), angles)
                _store(place, head_stride, heads, NUM_KV_HEADS, parts, k_scale, DIM, HALF)
            else:
                heads = (group - q_groups - kv_groups) * KV_HEADS + tl.arange(0, KV_HEADS)
                pdl.wait_for_previous()
                half: tl.constexpr = HALF if 2 * HALF < VALUE_DIM else VALUE_DIM // 2
                values = _load(v + token * v_stride, heads, NUM_KV_HEADS, VALUE_DIM, half)
                _store(place + to_value, head_stride, heads, NUM_KV_HEADS, values, v_scale, VALUE_DIM, half)


@triton.jit
def _angles(source, TURNING: tl.constexpr, HALF: tl.constexpr):
    """Return the cosines [1, HALF] of a token's position, and its sines, which lie behind them."""
    half = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    cos = tl.load(source + half, mask=half < TURNING, other=1.0)
    sin = tl.load(source + TURNING + half, mask=half < TURNING, other=0.0)
    return cos, sin


@triton.jit
def _weight(weight, DIM: tl.constexpr, HALF: tl.constexpr):
    """Return the parts of a norm's weight [DIM], [1, part] float32 each; none where `weight` is None."""
    parts = ()
    if weight is not None:
        parts = _load(weight, tl.arange(0, 1), 1, DIM, HALF)
    return parts


@triton.jit
def _load(source, heads, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr):
    """Return the parts of `heads` of one token, [heads, part] float32 each."""
    cells = source + heads[:, None] * DIM
    known = (heads < NUM_HEADS)[:, None]
    half = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    first = tl.load(cells + half, mask=known & (half < HALF), other=0.0).to(tl.float32)
    second = tl.load(cells + HALF + half, mask=known & (half < HALF), other=0.0).to(tl.float32)
    parts = (first, second)
    if DIM > 2 * HALF:
        behind = 2 * HALF + tl.arange(0, triton.next_power_of_2(DIM - 2 * HALF))[None, :]
        parts = parts + (tl.load(cells + behind, mask=known & (behind < DIM), other=0.0).to(tl.float32),)
    return parts


@triton.jit
def _norm(parts, weight, eps, DIM: tl.constexpr):
    """Apply RMSNorm over each head; `weight` in parts, or () for no norm."""
    if len(weight) > 0:
        parts = _normed(parts, weight, eps, DIM)
    return parts


@triton.jit
def _normed(parts, weight, eps, DIM: tl.constexpr):
    squares = tl.sum(parts[FIRST] * parts[FIRST] + parts[SECOND] * parts[SECOND], axis=1, keep_dims=True)
    if len(parts) > 2:
        squares += tl.sum(parts[BEHIND] * parts[BEHIND], axis=1, keep_dims=True)
    scale = tl.rsqrt(squares / DIM + eps)
    normed = (parts[FIRST] * scale * weight[FIRST], parts[SECOND] * scale * weight[SECOND])
    if len(parts) > 2:
        normed = normed + (parts[BEHIND] * scale * weight[BEHIND],)
    return normed


@triton.jit
def _rotate(parts, angles):
    """Rotate the first part against the second by `angles`, which are cosines and sines."""
    cos, sin = angles
    return (parts[FIRST] * cos - parts[SECOND] * sin, parts[SECOND] * cos + parts[FIRST] * sin) + parts[2:]


@triton.jit
def _store(
    target,  # of head 0
    head_stride,
    heads,
    NUM_HEADS: tl.constexpr,
    parts,
    scale,  # [1] float32 or None
    DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    cells = target + heads[:, None] * head_stride
    known = (heads < NUM_HEADS)[:, None]
    half = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    _store_part(cells + half, parts[FIRST], known & (half < HALF), scale)
    _store_part(cells + HALF + half, parts[SECOND], known & (half < HALF), scale)
    if DIM > 2 * HALF:
        behind = 2 * HALF + tl.arange(0, triton.next_power_of_2(DIM - 2 * HALF))[None, :]
        _store_part(cells + behind, parts[BEHIND], known & (behind < DIM), scale)


@triton.jit
def _store_part(cells, values, mask, scale):
    """Store values in the memory's dtype. For 8 bits, clamp them to the largest number, instead of giving infinity."""
    if scale is not None:
        values = values / tl.load(scale)
    if cells.dtype.element_ty == tl.float8e4nv:
        values = tl.clamp(values, -448.0, 448.0)
    tl.store(cells, values.to(cells.dtype.element_ty), mask=mask)
