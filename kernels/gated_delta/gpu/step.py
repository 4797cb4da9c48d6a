"""Decodes: a program has some value dimensions of one head's state in registers, and processes token by token.

    out = e^g q S + (q . k) change          change = beta (v - e^g k S)          S = e^g S + k^T change

So a state is read once, written once, and reduced over its key dimensions once per token, for k and q together. It is
prefetched while the previous kernel still runs.

With drafts, the state first advances by the previous step's accepted drafts, whose inputs were stored at places of the
row. The state is written after the step's first token. The inputs of the other tokens, which are drafts, are stored at
places that no program still reads.

There are two kernels with the same work. `step_tokens` leaves the layout of the state to Triton, and runs in the
interpreter. `step_tokens_by_columns` divides the value dimensions over the warps, so that sums over key dimensions need
no shared memory, and several warps can share the loads of a wide, contiguous part of a state.

No `from __future__ import annotations` here: Gluon reads annotations as objects.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
    draft_k,  # [places, NUM_HEADS / GROUP, KEY_DIM], all places drafts_stride apart; None: no decode has drafts
    draft_v,  # [places, NUM_HEADS, VALUE_DIM]
    draft_decay,  # [places, NUM_HEADS] or [places, NUM_HEADS, KEY_DIM]
    draft_beta,  # [places, NUM_HEADS]
    replay_rows,
    replay_starts,
    replay_counts,
    q_stride,
    k_stride,
    v_stride,
    decay_stride,
    beta_stride,
    state_stride,
    out_stride,
    drafts_stride,
    scale,
    eps,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_DIM, rounded up to a power of two
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,  # per program; divides VALUE_DIM
    NUM_PLACES: tl.constexpr,  # of a row, 0 without drafts
    PER_DIM: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    NORM: tl.constexpr,
    PREFETCH: tl.constexpr,  # values of the state in one cache line; 0: no prefetch
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
    inner = head * KEY_DIM * VALUE_DIM + dim[:, None] * VALUE_DIM + value[None, :]
    pdl.wait_for_previous()
    kept = tl.zeros([KEYS, VALUES], tl.float32)
    if from_arena:
        kept = load_dims(state + source * state_stride + inner, dim[:, None], KEY_DIM, KEYS)
    _advance(
        *(kept, dim, value, tl.program_id(0) == 0, seq, head, begin, end, target),
        *(q, k, v, decay, beta, log_rate, bias, state, out),
        *(draft_k, draft_v, draft_decay, draft_beta, replay_rows, replay_starts, replay_counts),
        *(q_stride, k_stride, v_stride, decay_stride, beta_stride, state_stride, out_stride, drafts_stride),
        *(scale, eps, GROUP, KEY_DIM, KEYS, VALUE_DIM, NUM_PLACES, PER_DIM, BETA_SCALE, NORM),
    )


@gluon.jit
def step_tokens_by_columns(
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
    draft_k,  # [places, NUM_HEADS / GROUP, KEY_DIM], all places drafts_stride apart; None: no decode has drafts
    draft_v,  # [places, NUM_HEADS, VALUE_DIM]
    draft_decay,  # [places, NUM_HEADS] or [places, NUM_HEADS, KEY_DIM]
    draft_beta,  # [places, NUM_HEADS]
    replay_rows,
    replay_starts,
    replay_counts,
    q_stride,
    k_stride,
    v_stride,
    decay_stride,
    beta_stride,
    state_stride,
    out_stride,
    drafts_stride,
    scale,
    eps,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_DIM, rounded up to a power of two
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,  # per program; divides VALUE_DIM
    NUM_PLACES: tl.constexpr,  # of a row, 0 without drafts
    PER_DIM: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    NORM: tl.constexpr,
    PREFETCH: tl.constexpr,
    WARPS: tl.constexpr,
    LANES: tl.constexpr,  # threads of a warp along the key dimensions
):
    """Do what `step_tokens` does, with the state in a layout in which sums over key dimensions stay within a warp."""
    layout: gl.constexpr = gl.BlockedLayout([KEYS // LANES, 4], [LANES, 32 // LANES], [1, WARPS], [1, 0])
    lines: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    pdl.let_next_start()
    seq = gl.program_id(2)
    head = gl.program_id(1)
    value = gl.program_id(0) * VALUES + gl.arange(0, VALUES, layout=gl.SliceLayout(0, layout))
    dim = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    begin = gl.load(query_start + seq)
    end = gl.where(seq < gl.load(num_decodes), gl.load(query_start + seq + 1), begin)
    source = gl.load(sources + seq).to(gl.int64)
    target = gl.load(targets + seq).to(gl.int64)
    from_arena = (source >= 0) & (begin < end)
    if PREFETCH > 0:  # noqa: SIM102  (the first is known to the compiler)
        if from_arena:
            row = head * KEY_DIM + gl.minimum(gl.arange(0, KEYS, layout=lines), KEY_DIM - 1)
            for line in gl.static_range(VALUES // PREFETCH):
                first = gl.program_id(0) * VALUES + line * PREFETCH
                pdl.prefetch(state + source * state_stride + row * VALUE_DIM + first)
    inner = head * KEY_DIM * VALUE_DIM + dim[:, None] * VALUE_DIM + value[None, :]
    pdl.wait_for_previous()
    kept = gl.zeros([KEYS, VALUES], gl.float32, layout=layout)
    if from_arena:
        kept = load_dims(state + source * state_stride + inner, dim[:, None], KEY_DIM, KEYS)
    _advance(
        *(kept, dim, value, gl.program_id(0) == 0, seq, head, begin, end, target),
        *(q, k, v, decay, beta, log_rate, bias, state, out),
        *(draft_k, draft_v, draft_decay, draft_beta, replay_rows, replay_starts, replay_counts),
        *(q_stride, k_stride, v_stride, decay_stride, beta_stride, state_stride, out_stride, drafts_stride),
        *(scale, eps, GROUP, KEY_DIM, KEYS, VALUE_DIM, NUM_PLACES, PER_DIM, BETA_SCALE, NORM),
    )


@triton.jit
def _advance(
    kept,
    dim,
    value,
    first_of_head,
    seq,
    head,
    begin,
    end,
    target,
    q,
    k,
    v,
    decay,
    beta,
    log_rate,
    bias,
    state,
    out,
    draft_k,
    draft_v,
    draft_decay,
    draft_beta,
    replay_rows,
    replay_starts,
    replay_counts,
    q_stride,
    k_stride,
    v_stride,
    decay_stride,
    beta_stride,
    state_stride,
    out_stride,
    drafts_stride,
    scale,
    eps,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_PLACES: tl.constexpr,
    PER_DIM: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Process a sequence's tokens, given the state [KEYS, VALUES] of one head before them, and store what they give.

    `dim` and `value` are the state's dimensions, in the layouts of its rows and columns.
    """
    rate, offset = None, None  # Triton 3.6 compiles no function that returns these two
    if log_rate is not None:
        rate = tl.exp(tl.load(log_rate + head))
        if PER_DIM:
            offset = load_dims(bias + head * KEY_DIM + dim, dim, KEY_DIM, KEYS)
        else:
            offset = tl.load(bias + head)
    inner = head * KEY_DIM * VALUE_DIM + dim[:, None] * VALUE_DIM + value[None, :]
    key_cells = head // GROUP * KEY_DIM + dim
    value_cells = head * VALUE_DIM + value
    gate_cells = head
    if PER_DIM:
        gate_cells = head * KEY_DIM + dim
    if NUM_PLACES > 0:
        own = tl.load(replay_rows + seq).to(tl.int64) * NUM_PLACES
        start = tl.load(replay_starts + seq)
        count = tl.where(begin < end, tl.load(replay_counts + seq), 0)
        for position in range(start - count, start):
            place = (own + position % NUM_PLACES) * drafts_stride
            key = load_dims(draft_k + place + key_cells, dim, KEY_DIM, KEYS).to(tl.float32)
            values = tl.load(draft_v + place + value_cells).to(tl.float32)
            strength = write_strength(tl.load(draft_beta + place + head), rate, BETA_SCALE)
            key *= reciprocal_length(tl.sum(key * key, axis=0), eps, NORM)
            kept = _decayed(kept, draft_decay + place + gate_cells, rate, offset, dim, KEY_DIM, KEYS, PER_DIM)
            change = strength * (values - tl.sum(kept * key[:, None], axis=0))
            kept += key[:, None] * change[None, :]
    for index in range(begin, end):
        token = tl.cast(index, tl.int64)
        raw_key = load_dims(k + token * k_stride + key_cells, dim, KEY_DIM, KEYS)
        query = load_dims(q + token * q_stride + key_cells, dim, KEY_DIM, KEYS).to(tl.float32)
        raw_values = tl.load(v + token * v_stride + value_cells)
        raw_beta = tl.load(beta + token * beta_stride + head)
        key, values = raw_key.to(tl.float32), raw_values.to(tl.float32)
        strength = write_strength(raw_beta, rate, BETA_SCALE)
        key *= reciprocal_length(tl.sum(key * key, axis=0), eps, NORM)
        query *= reciprocal_length(tl.sum(query * query, axis=0), eps, NORM) * scale
        decays = decay + token * decay_stride + gate_cells
        kept = _decayed(kept, decays, rate, offset, dim, KEY_DIM, KEYS, PER_DIM)
        read = tl.sum(kept * key[:, None], axis=0)
        result = tl.sum(kept * query[:, None], axis=0)
        change = strength * (values - read)
        result += tl.sum(query * key, axis=0) * change
        kept += key[:, None] * change[None, :]
        tl.store(out + token * out_stride + value_cells, result.to(out.dtype.element_ty))
        if NUM_PLACES > 0:
            if index == begin:
                if target >= 0:
                    store_dims(state + target * state_stride + inner, kept, dim[:, None], KEY_DIM, KEYS)
            else:
                place = (own + (start + index - begin) % NUM_PLACES) * drafts_stride
                tl.store(draft_v + place + value_cells, raw_values)
                if first_of_head:
                    tl.store(draft_beta + place + head, raw_beta)
                    if PER_DIM:
                        raw_decay = load_dims(decays, dim, KEY_DIM, KEYS)
                        store_dims(draft_decay + place + gate_cells, raw_decay, dim, KEY_DIM, KEYS)
                    else:
                        tl.store(draft_decay + place + gate_cells, tl.load(decays))
                    if head % GROUP == 0:
                        store_dims(draft_k + place + key_cells, raw_key, dim, KEY_DIM, KEYS)
    if NUM_PLACES == 0:  # noqa: SIM102  (the first is known to the compiler)
        if target >= 0 and begin < end:
            store_dims(state + target * state_stride + inner, kept, dim[:, None], KEY_DIM, KEYS)


@triton.jit
def _decayed(kept, decays, rate, offset, dim, KEY_DIM: tl.constexpr, KEYS: tl.constexpr, PER_DIM: tl.constexpr):
    """Return the state [KEYS, VALUES] after a token's decay. `decays` points to its decays, or to its single one."""
    if PER_DIM:
        factor = tl.exp2(log2_decay(load_dims(decays, dim, KEY_DIM, KEYS), rate, offset))[:, None]
    else:
        factor = tl.exp2(log2_decay(tl.load(decays), rate, offset))
    return kept * factor
