"""Output of decode attention, when a program has finished a sequence in its share of keys.

    the share has the whole sequence     its result is written
    the share has a part of it           the part is stored; the program that finishes last combines the parts, or a
                                         second kernel (`decode_combine`) if the plan says so

The Gluon functions are for the kernels of `decode_tma`, with heads in columns. `write_rows` and `capped` are for the
Triton kernels.

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from baton.kernels.arrivals import is_last_to_arrive
from baton.kernels.hopper.flash import Partial
from baton.kernels.hopper.rings import Value, record
from baton.kernels.hopper.stored_parts import StoredParts, columns, dims, merge_stored
from baton.kernels.split_kv import LOG2_E

from .decode_plan import part_number

# rows of parts of a sequence that are loaded concurrently: with more, two programs of 32 rows would lack registers
ROWS_AT_ONCE, MOST_PARTS_AT_ONCE = gl.constexpr(64), gl.constexpr(4)


@record
class DecodeParts:
    """The workspace for parts of results: see `DecodePlan`."""

    sums: gl.tensor
    tops: gl.tensor
    arrivals: gl.tensor
    num_shares: gl.tensor


@record
class DecodeOutput:
    """The step's output, and the inputs of the final computation."""

    out: gl.tensor
    sinks: Value  # pointer, or None
    parts: DecodeParts
    num_tokens: gl.tensor


@gluon.jit
def finish(found, first_token, num_queries, unit, part, passed, share, output, value_scale, shape):
    """Write the result `found` of a sequence, or store it as a part.

    It covers `part` of the sequence, from the sequence's unit `unit` on, after `passed` units of other sequences in the
    share. The queries are `num_queries` tokens from `first_token` on. `value_scale` is the factor of values, or None.
    """
    target = _target(first_token, share.head, output, shape)
    if part.units == part.all_units:
        _write(found, target, num_queries, output.sinks, value_scale, share.head, shape)
    else:
        number = gl.program_id(0) // shape.HEADS
        _store_part(found, output.parts, number, unit == 0, share.head, shape)
        if not shape.APART:
            seq_begin = number * share.units_per_share() + passed - unit
            _combine_if_last(seq_begin, part.all_units, share, target, num_queries, output, value_scale, shape)


@gluon.jit
def clear_padding(sequences, share, output, shape):
    """Write zeros for the tokens after the last sequence. The programs of all shares divide this work."""
    if shape.QUERIES > 1:
        first = gl.load(sequences.query_start + sequences.num_seqs) + gl.program_id(0) // shape.HEADS
        row = gl.zeros([shape.ROWS], gl.float32, gl.SliceLayout(0, shape.MMA))
        nothing = Partial(gl.zeros([shape.DIM, shape.ROWS], gl.float32, shape.MMA), row, row)
        for token in range(first, output.num_tokens, output.parts.num_shares):
            _write(nothing, _target(token, share.head, output, shape), 1, None, None, share.head, shape)


@gluon.jit
def _target(token, head, output, shape):
    """Return a pointer to the output of the first query head, of this token, that reads the KV head."""
    return output.out + (token.to(gl.int64) * shape.HEADS + head) * (shape.GROUP * shape.DIM)


@gluon.jit
def _write(found, target, num_queries, sinks, value_scale, head, shape):
    """Write the query heads that read a KV head, for `num_queries` queries; zeros if they saw no key."""
    sums, weight, top = found.sums, found.weight, found.top
    row = columns(shape.ROWS, shape.MMA)
    is_real = row < num_queries * shape.GROUP
    if sinks is not None:
        sink = gl.load(sinks + head * shape.GROUP + row % shape.GROUP, mask=is_real, other=0.0) * LOG2_E
        new_top = gl.maximum(top, sink)
        weight = weight * gl.exp2(top - new_top) + gl.exp2(sink - new_top)
        sums = sums * gl.expand_dims(gl.exp2(top - new_top), 0)
    result = sums / gl.expand_dims(gl.where(weight == 0, 1.0, weight), 0)
    if value_scale is not None:
        result = result * value_scale
    if shape.QUERIES > 1:
        row = row // shape.GROUP * (shape.HEADS * shape.GROUP) + row % shape.GROUP
    place = target + gl.expand_dims(row * shape.DIM, 0) + dims(shape.DIM, shape.MMA)
    gl.store(place, result.to(target.dtype.element_ty), mask=gl.expand_dims(is_real, 0))


@gluon.jit
def _places_of_part(parts, share, begins, head, LAYOUT: gl.constexpr, shape):
    """Return pointers to the part of `share`, one for each field of `Partial`."""
    row, dim = columns(shape.ROWS, LAYOUT), dims(shape.DIM, LAYOUT)
    part = (part_number(share, begins) * shape.HEADS + head) * shape.REAL_ROWS + row
    place = parts.sums + gl.expand_dims(part * shape.DIM, 0) + dim
    return Partial(place, parts.tops + parts.num_shares * (2 * shape.HEADS * shape.REAL_ROWS) + part, parts.tops + part)


@gluon.jit
def _store_part(found, parts, share, begins, head, shape):
    places = _places_of_part(parts, share, begins, head, shape.MMA, shape)
    is_real = columns(shape.ROWS, shape.MMA) < shape.REAL_ROWS
    gl.store(places.sums, found.sums, mask=gl.expand_dims(is_real, 0))
    gl.store(places.top, found.top, mask=is_real)
    gl.store(places.weight, found.weight, mask=is_real)


@gluon.jit
def _combine_if_last(seq_begin, all_units, share, target, num_queries, output, value_scale, shape):
    """Combine and write a sequence if all its other parts are stored. Its `all_units` units begin at `seq_begin`."""
    parts = output.parts
    per_share = share.units_per_share()
    first_share, last_share = seq_begin // per_share, (seq_begin + all_units - 1) // per_share
    arrival = parts.arrivals + first_share * shape.HEADS + share.head
    if is_last_to_arrive(arrival, last_share - first_share):
        stored = StoredParts(parts, share.head, first_share, last_share, shape.REAL_ROWS)
        AT_ONCE: gl.constexpr = min(MOST_PARTS_AT_ONCE, ROWS_AT_ONCE // shape.ROWS)
        merged = merge_stored(stored, _places_of_part, shape, shape.DIM, AT_ONCE, shape.MMA)
        _write(merged, target, num_queries, output.sinks, value_scale, share.head, shape)


@triton.jit
def write_rows(
    total,
    weight,
    top,
    place,
    sinks,
    v_scale,
    head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    query_stride=0,
    num_queries=1,
):
    """Write the GROUP query heads of a KV head, for one query after the other; zeros if they saw no key.

    `place` is the offset of the first query's first head. The next query's heads are `query_stride` elements further.
    """
    row = tl.arange(0, total.shape[0])
    dim = tl.arange(0, total.shape[1])
    is_real = row < num_queries * GROUP
    if sinks is not None:
        sink = tl.load(sinks + head * GROUP + row % GROUP, mask=is_real, other=0.0) * LOG2_E
        new_top = tl.maximum(top, sink)
        weight = weight * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
        total *= tl.exp2(top - new_top)[:, None]
    result = total / tl.where(weight == 0, 1.0, weight)[:, None]
    if v_scale is not None:
        result *= tl.load(v_scale)
    mask = is_real[:, None] & (dim < DIM)[None, :]
    rows = row // GROUP * query_stride + row % GROUP * DIM
    tl.store(place + rows[:, None] + dim[None, :], result.to(place.dtype.element_ty), mask=mask)


@triton.jit
def capped(scores, soft_cap):
    """Return cap * tanh(score / cap), where tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    return soft_cap * (1 - 2 / (tl.exp2(scores * (2 * LOG2_E / soft_cap)) + 1))
