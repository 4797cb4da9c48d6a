"""What becomes of the sums that a share has of a sequence, in the kernels of `decode_tma`.

    all of the sequence     its result is written at once
    a part of it            is kept, until a kernel of its own adds the parts (`decode_combine`), or the
                            program that comes last does

`found`, throughout: sums of values [DIM, ROWS], sums of weights [ROWS], top scores [ROWS].
`results`: the output, sinks, what values are multiplied by in the end (or None), the workspace of parts.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from baton.kernels.hopper.rings import barrier
from baton.kernels.split_kv import LOG2_E, LOWEST

PARTS_AT_ONCE = gl.constexpr(4)  # of a sequence in several shares, that are on their way when they are put together


@gluon.jit
def finish(found, seq, unit, units, all_units, passed, share, results, shape):
    """Sequence `seq` has `all_units`; this share has `units` of them, from `unit` on, behind `passed` of others."""
    words, head = share
    target = results[0] + (seq.to(gl.int64) * shape.HEADS + head) * (shape.GROUP * shape.DIM)
    if units == all_units:
        _write(found, target, results, head, shape)
    else:
        number = gl.program_id(0) // shape.HEADS
        _keep_part(found, results[3], number, unit == 0, head, shape)
        if not shape.APART:
            _add_if_last(number * gl.load(words + 3) + passed - unit, all_units, words, target, results, head, shape)


@gluon.jit
def _rows(shape):
    return gl.arange(0, shape.ROWS, gl.SliceLayout(0, shape.MMA))


@gluon.jit
def _dims(shape):
    return gl.expand_dims(gl.arange(0, shape.DIM, gl.SliceLayout(1, shape.MMA)), 1)


@gluon.jit
def _write(found, target, results, head, shape):
    """Return the query heads of a KV head of one sequence; zeros where there was no key."""
    sums, weight, top = found
    _, sinks, value_scale, _ = results
    row = _rows(shape)
    if sinks is not None:
        sink = gl.load(sinks + head * shape.GROUP + row, mask=row < shape.GROUP, other=0.0) * LOG2_E
        new_top = gl.maximum(top, sink)
        weight = weight * gl.exp2(top - new_top) + gl.exp2(sink - new_top)
        sums = sums * gl.expand_dims(gl.exp2(top - new_top), 0)
    result = sums / gl.expand_dims(gl.where(weight == 0, 1.0, weight), 0)
    if value_scale is not None:
        result = result * value_scale
    place = target + gl.expand_dims(row * shape.DIM, 0) + _dims(shape)
    gl.store(place, result.to(target.dtype.element_ty), mask=gl.expand_dims(row < shape.GROUP, 0))


@gluon.jit
def _places_of_part(parts, share, begins, head, shape):
    """Where sums, top scores and weights lie of what `share` has of a sequence, which `begins` in it or goes on."""
    sums, tops, _, num_shares = parts
    part = ((share * 2 + begins.to(gl.int32)) * shape.HEADS + head) * shape.GROUP + _rows(shape)
    place = sums + gl.expand_dims(part * shape.DIM, 0) + _dims(shape)
    return place, tops + part, tops + num_shares * (2 * shape.HEADS * shape.GROUP) + part


@gluon.jit
def _keep_part(found, parts, share, begins, head, shape):
    sums, weight, top = found
    of_sums, of_tops, of_weights = _places_of_part(parts, share, begins, head, shape)
    is_real = _rows(shape) < shape.GROUP
    gl.store(of_sums, sums, mask=gl.expand_dims(is_real, 0))
    gl.store(of_tops, top, mask=is_real)
    gl.store(of_weights, weight, mask=is_real)


@gluon.jit
def load_part(places, exists):
    """What was kept there, `exists` [ROWS]; past the first cache, since other multiprocessors wrote it."""
    sums = gl.load(places[0], mask=gl.expand_dims(exists, 0), other=0.0, cache_modifier=".cg")
    top = gl.load(places[1], mask=exists, other=LOWEST, cache_modifier=".cg")
    weight = gl.load(places[2], mask=exists, other=0.0, cache_modifier=".cg")
    return sums, weight, top


@gluon.jit
def added(found, part):
    """Return the sums of two parts as those of one."""
    sums, weight, top = found
    part_sums, part_weight, part_top = part
    new_top = gl.maximum(top, part_top)
    grow, shrink = gl.exp2(part_top - new_top), gl.exp2(top - new_top)
    sums = sums * gl.expand_dims(shrink, 0) + part_sums * gl.expand_dims(grow, 0)
    return sums, weight * shrink + part_weight * grow, new_top


@gluon.jit
def _add_if_last(seq_begin, all_units, words, target, results, head, shape):
    """Write a sequence whose units are `all_units` of the step's from `seq_begin` on, once all its parts are there."""
    parts = results[3]
    per_share = gl.load(words + 3)
    first_share, last_share = seq_begin // per_share, (seq_begin + all_units - 1) // per_share
    arrival = parts[2] + first_share * shape.HEADS + head
    barrier()  # all threads have stored before one of them says so
    if gl.atomic_add(arrival, 1, sem="acq_rel") == last_share - first_share:
        gl.store(arrival, 0)  # for the next layer
        top = gl.full([shape.ROWS], LOWEST, gl.float32, gl.SliceLayout(0, shape.MMA))
        weight = gl.zeros([shape.ROWS], gl.float32, gl.SliceLayout(0, shape.MMA))
        sums = gl.zeros([shape.DIM, shape.ROWS], gl.float32, shape.MMA)
        for base in range(first_share, last_share + 1, PARTS_AT_ONCE):
            here = ()
            for i in gl.static_range(PARTS_AT_ONCE):
                places = _places_of_part(parts, base + i, base + i == first_share, head, shape)
                exists = (_rows(shape) < shape.GROUP) & (base + i <= last_share)
                here = here + (load_part(places, exists),)
            for i in gl.static_range(PARTS_AT_ONCE):
                sums, weight, top = added((sums, weight, top), here[i])
        _write((sums, weight, top), target, results, head, shape)


@triton.jit
def write_rows(total, weight, top, place, sinks, v_scale, head, GROUP: tl.constexpr, DIM: tl.constexpr):
    """Write the GROUP query heads of a KV head of one sequence; zeros where there was no key."""
    row = tl.arange(0, total.shape[0])
    dim = tl.arange(0, total.shape[1])
    if sinks is not None:
        sink = tl.load(sinks + head * GROUP + row, mask=row < GROUP, other=0.0) * LOG2_E
        new_top = tl.maximum(top, sink)
        weight = weight * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
        total *= tl.exp2(top - new_top)[:, None]
    result = total / tl.where(weight == 0, 1.0, weight)[:, None]
    if v_scale is not None:
        result *= tl.load(v_scale)
    mask = (row < GROUP)[:, None] & (dim < DIM)[None, :]
    tl.store(place + row[:, None] * DIM + dim[None, :], result.to(place.dtype.element_ty), mask=mask)


@triton.jit
def capped(scores, soft_cap):
    """cap * tanh(score / cap), where tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    return soft_cap * (1 - 2 / (tl.exp2(scores * (2 * LOG2_E / soft_cap)) + 1))
