"""What becomes of the sums that a share has of an item, in `absorbed_hopper`.

    all of the item     its result is written at once
    a part of it        is kept, until a kernel of its own adds the parts (`combine`), or the program that comes last
                        with one does

`found`, throughout: sums of latents [RANK, ROWS], sums of weights [ROWS], top scores [ROWS].
`results`: the output, how many heads it has, the workspace of parts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from baton.kernels.attention.gpu.decode_output import added, load_part
from baton.kernels.hopper.rings import barrier
from baton.kernels.split_kv import LOWEST

from .work_list import programs_of

PARTS_IN_REGISTERS = gl.constexpr(32)  # rows of parts that are on their way when they are put together


@gluon.jit
def finish(found, item, tile, end, work, results, shape):
    """This share has the tiles from `tile` to `end` of an item."""
    items, starts, _, _ = work
    token = gl.load(items + 4 * item)
    item_start, item_end = gl.load(starts + item), gl.load(starts + item + 1)
    if (tile == item_start) & (end == item_end):
        _write(found, token, results, shape.MMA, shape)
    else:
        _keep_part(found, results[2], tile == item_start, shape)
        if not shape.APART:
            _add_if_last(item_start, item_end, token, work, results, shape)


@gluon.jit
def _write(found, token, results, LAYOUT: gl.constexpr, shape):
    """Return the heads of a group of one token."""
    sums, weight, _ = found
    out, num_heads, _ = results
    head = gl.program_id(1) * shape.ROWS + gl.arange(0, shape.ROWS, gl.SliceLayout(0, LAYOUT))
    dim = gl.expand_dims(gl.arange(0, shape.RANK, gl.SliceLayout(1, LAYOUT)), 1)
    place = gl.expand_dims((token.to(gl.int64) * num_heads + head) * shape.RANK, 0) + dim
    result = sums / gl.expand_dims(weight, 0)
    gl.store(out + place, result.to(out.dtype.element_ty), mask=gl.expand_dims(head < num_heads, 0))


@gluon.jit
def _places_of_part(parts, program, begins, LAYOUT: gl.constexpr, shape):
    """Where sums, top scores and weights lie of what `program` has of an item, which `begins` in its share or not."""
    sums, softmax, _ = parts
    row = gl.arange(0, shape.ROWS, gl.SliceLayout(0, LAYOUT))
    dim = gl.expand_dims(gl.arange(0, shape.RANK, gl.SliceLayout(1, LAYOUT)), 1)
    number = gl.program_id(1) * gl.num_programs(0) + program
    part = (number.to(gl.int64) * 2 + begins.to(gl.int32)) * shape.ROWS + row
    return sums + gl.expand_dims(part * shape.RANK, 0) + dim, softmax + 2 * part, softmax + 2 * part + 1


@gluon.jit
def _keep_part(found, parts, begins, shape):
    sums, weight, top = found
    of_sums, of_tops, of_weights = _places_of_part(parts, gl.program_id(0), begins, shape.MMA, shape)
    gl.store(of_sums, sums)
    gl.store(of_tops, top)
    gl.store(of_weights, weight)


@gluon.jit
def _add_if_last(start, end, token, work, results, shape):
    """Write the item of tiles `start` to `end`, once all its parts are there: adds them in the order of its keys."""
    _, starts, _, max_items = work
    parts = results[2]
    SPREAD: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, 4], [0, 1])
    AT_ONCE: gl.constexpr = PARTS_IN_REGISTERS // shape.ROWS
    first, last = programs_of(start, end, gl.load(starts + max_items), gl.num_programs(0))
    arrival = parts[2] + gl.program_id(1) * gl.num_programs(0) + first
    barrier()  # all threads have stored before one of them says so
    if gl.atomic_add(arrival, 1, sem="acq_rel") == last - first:
        gl.store(arrival, 0)  # for the next layer
        top = gl.full([shape.ROWS], LOWEST, gl.float32, gl.SliceLayout(0, SPREAD))
        weight = gl.zeros([shape.ROWS], gl.float32, gl.SliceLayout(0, SPREAD))
        sums = gl.zeros([shape.RANK, shape.ROWS], gl.float32, SPREAD)
        for base in range(first, last + 1, AT_ONCE):
            here = ()
            for i in gl.static_range(AT_ONCE):
                places = _places_of_part(parts, base + i, base + i == first, SPREAD, shape)
                exists = gl.full([shape.ROWS], base + i <= last, gl.int1, gl.SliceLayout(0, SPREAD))
                here = here + (load_part(places, exists),)
            for i in gl.static_range(AT_ONCE):
                sums, weight, top = added((sums, weight, top), here[i])
        _write((sums, weight, top), token, results, SPREAD, shape)
