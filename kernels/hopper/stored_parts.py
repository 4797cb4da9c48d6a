"""The parts of a result that several programs have stored, merged by the one that comes last: split-KV with queries in
columns (see `kernels.split_kv`).

Annotations are read by Triton: this module evaluates them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from baton.kernels.split_kv import LOWEST, load_part, merge_part

from .flash import Partial


@gluon.jit
def merge_stored(
    places_of_part: gl.constexpr,
    parts,
    head,
    first,
    last,
    num_rows,
    shape,
    DIM: gl.constexpr,
    AT_ONCE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Return the `Partial` of the programs `first` to `last`, in the order of the keys.

    `places_of_part(parts, program, begins, head, LAYOUT, shape)` gives the pointers to a part, as the fields of
    `Partial`: `begins` says that the result's first key is that program's. The first `num_rows` of shape.ROWS rows
    exist. The loads of AT_ONCE parts are under way together.
    """
    row = gl.arange(0, shape.ROWS, gl.SliceLayout(0, LAYOUT))
    top = gl.full([shape.ROWS], LOWEST, gl.float32, gl.SliceLayout(0, LAYOUT))
    weight = gl.zeros([shape.ROWS], gl.float32, gl.SliceLayout(0, LAYOUT))
    sums = gl.zeros([DIM, shape.ROWS], gl.float32, LAYOUT)
    for base in range(first, last + 1, AT_ONCE):
        here = ()
        for i in gl.static_range(AT_ONCE):
            places = places_of_part(parts, base + i, base + i == first, head, LAYOUT, shape)
            exists = (row < num_rows) & (base + i <= last)
            here = here + (load_part(places.sums, places.weight, places.top, exists, 0),)
        for i in gl.static_range(AT_ONCE):
            part_sums, part_weight, part_top = here[i]
            sums, weight, top = merge_part(sums, weight, top, part_sums, part_weight, part_top, 0)
    return Partial(sums, weight, top)
