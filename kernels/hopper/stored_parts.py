"""Merges the parts of a result that several programs have stored: split-KV with queries in columns.

The program that finishes last merges them (see `kernels.split_kv`).

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from baton.kernels.split_kv import LOWEST, load_part, merge_part

from .flash import Partial
from .rings import Value, record


@record
class StoredParts:
    """The parts of one result, stored by programs `first` to `last`, in the order of its keys."""

    memory: Value  # workspace with the parts of all results
    head: gl.tensor  # the KV head, or the group of heads, of the result
    first: gl.tensor
    last: gl.tensor
    num_rows: Value  # number of real rows among shape.ROWS


@gluon.jit
def columns(ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the query index of each column of sums [DIM, ROWS] in a layout."""
    return gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))


@gluon.jit
def dims(DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the dimension [DIM, 1] of each row of sums [DIM, ROWS] in a layout."""
    return gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def merge_stored(
    stored,
    places_of_part: gl.constexpr,
    shape,
    DIM: gl.constexpr,
    AT_ONCE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Return the merged `Partial` of `StoredParts`.

    `places_of_part(memory, program, begins, head, LAYOUT, shape)` returns pointers to a part, one for each field of
    `Partial`; `begins` means that the result's first key belongs to that program. AT_ONCE parts are loaded at a time.
    """
    first, last = stored.first, stored.last
    row = columns(shape.ROWS, LAYOUT)
    top = gl.full([shape.ROWS], LOWEST, gl.float32, gl.SliceLayout(0, LAYOUT))
    weight = gl.zeros([shape.ROWS], gl.float32, gl.SliceLayout(0, LAYOUT))
    sums = gl.zeros([DIM, shape.ROWS], gl.float32, LAYOUT)
    for base in range(first, last + 1, AT_ONCE):
        here = ()
        for i in gl.static_range(AT_ONCE):
            places = places_of_part(stored.memory, base + i, base + i == first, stored.head, LAYOUT, shape)
            exists = (row < stored.num_rows) & (base + i <= last)
            here = here + (load_part(places.sums, places.weight, places.top, exists, 0),)
        for i in gl.static_range(AT_ONCE):
            part_sums, part_weight, part_top = here[i]
            sums, weight, top = merge_part(sums, weight, top, part_sums, part_weight, part_top, 0)
    return Partial(sums, weight, top)
