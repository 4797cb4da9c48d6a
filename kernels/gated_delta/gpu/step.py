"""Decodes: a program has some value dimensions of one head's state in its registers and goes token by token.

    out = e^g q S + (q . k) change          change = beta (v - e^g k S)          S = e^g S + k^T change

So a state is read once, written once, and reduced over its key dimensions once a token, for k and q together. Its cells
are prefetched while the kernel before this one still runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import pdl

from .gates import load_dims, log2_decay, reciprocal_length, store_dims, write_strength


@triton.jit
def step_tokens(
    q,  # [T, NUM_HEADS / GROUP, KEY_DIM], tokens q_stride apart
    k,
    v,  # [T, NUM_HEADS, VALUE_DIM], tokens v_stride apart
    decay,  # [T, NUM_HEADS] or [T, NUM_HEADS, KEY_DIM], tokens decay_stride apart
    beta,  # [T, NUM_HEADS]
    log_rate,  # [NUM_HEADS] float32 or None
    bias,
    state,  # [slots, NUM_HEADS, KEY_DIM, VALUE_DIM] float32, slots state_stride apart
    query_start,
    sources,
    targets,
    num_decodes,
    out,  # [T, NUM_HEADS, VALUE_DIM], tokens out_stride apart
    q_stride,
    k_stride,
    v_stride,
    decay_stride,
    beta_stride,
    state_stride,
    out_stride,
    scale,
    eps,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_DIM, up to a power of two
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,  # of a program; divides VALUE_DIM
    PER_DIM: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    NORM: tl.constexpr,
    PREFETCH: tl.constexpr,  # cells of the state that lie in one line of the cache, 0: none are prefetched
):
    pdl.let_next_start()
    seq = tl.program_id(2)
    head = tl.program_id(1)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    dim = tl.arange(0, KEYS)
    begin = tl.load(query_start + seq)
    end = tl.where(seq < tl.load(num_decodes), tl.load(query_start + seq + 1), begin)
    source = tl.load(sources + seq).to(tl.int64)
    target = tl.load(targets + seq).to(tl.int64)
    from_arena = source >= 0 and begin < end
    if PREFETCH > 0:  # noqa: SIM102  (the first is known to the compiler)
        if from_arena:
            line = tl.program_id(0) * VALUES + tl.arange(0, VALUES // PREFETCH) * PREFETCH
            rows = head * KEY_DIM + tl.minimum(dim, KEY_DIM - 1)
            pdl.prefetch(state + source * state_stride + rows[:, None] * VALUE_DIM + line[None, :])
    rate = None
    if log_rate is not None:
        rate = tl.exp(tl.load(log_rate + head))
    offset = None
    if log_rate is not None:
        if PER_DIM:
            offset = load_dims(bias + head * KEY_DIM + dim, dim, KEY_DIM, KEYS)
        else:
            offset = tl.load(bias + head)
    inner = head * KEY_DIM * VALUE_DIM + dim[:, None] * VALUE_DIM + value[None, :]
    pdl.wait_for_previous()
    kept = tl.zeros([KEYS, VALUES], tl.float32)
    if from_arena:
        kept = load_dims(state + source * state_stride + inner, dim[:, None], KEY_DIM, KEYS)
    for index in range(begin, end):
        token = tl.cast(index, tl.int64)
        cells = head // GROUP * KEY_DIM + dim
        key = load_dims(k + token * k_stride + cells, dim, KEY_DIM, KEYS).to(tl.float32)
        query = load_dims(q + token * q_stride + cells, dim, KEY_DIM, KEYS).to(tl.float32)
        values = tl.load(v + token * v_stride + head * VALUE_DIM + value).to(tl.float32)
        strength = write_strength(tl.load(beta + token * beta_stride + head), rate, BETA_SCALE)
        key *= reciprocal_length(tl.sum(key * key, axis=0), eps, NORM)
        query *= reciprocal_length(tl.sum(query * query, axis=0), eps, NORM) * scale
        if PER_DIM:
            gates = load_dims(decay + token * decay_stride + head * KEY_DIM + dim, dim, KEY_DIM, KEYS)
            kept *= tl.exp2(log2_decay(gates, rate, offset))[:, None]
        else:
            kept *= tl.exp2(log2_decay(tl.load(decay + token * decay_stride + head), rate, offset))
        read = tl.sum(kept * key[:, None], axis=0)
        result = tl.sum(kept * query[:, None], axis=0)
        change = strength * (values - read)
        result += tl.sum(query * key, axis=0) * change
        kept += key[:, None] * change[None, :]
        tl.store(out + token * out_stride + head * VALUE_DIM + value, result.to(out.dtype.element_ty))
    if target >= 0 and begin < end:
        store_dims(state + target * state_stride + inner, kept, dim[:, None], KEY_DIM, KEYS)
