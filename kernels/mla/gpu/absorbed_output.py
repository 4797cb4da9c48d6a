"""Output of absorbed MLA for Hopper, when a program has finished an item in its share.

    the share has the whole item     its result is written
    the share has a part of it       the part is stored; the program that finishes last combines the parts, or a second
                                     kernel (`combine`)

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from baton.kernels.arrivals import is_last_to_arrive
from baton.kernels.hopper.flash import Partial
from baton.kernels.hopper.rings import Value, record
from baton.kernels.hopper.stored_parts import StoredParts, columns, dims, merge_stored

from .work_list import (
    FIRST_ITEM,
    FIRST_TILE,
    FIRST_TOKEN,
    ITEM_WORDS,
    NUM_QUERIES,
    NUM_VISIBLE,
    SHARE_WORDS,
    TABLE_ROW,
    programs_of,
)

PARTS_IN_REGISTERS = gl.constexpr(32)  # rows of parts that are loaded concurrently


@record
class Item:
    """An item (query tokens and their keys), and its tiles in this program's share."""

    start: gl.tensor  # its first tile
    end: gl.tensor  # one past its last tile in the share
    token: gl.tensor  # its first query token
    num_visible: gl.tensor  # number of keys that the first token sees
    num_keys: gl.tensor  # number of keys that the last token sees
    table_row: gl.tensor


@record
class Work:
    """Pointers to the fields of `work_list.WorkList`, and the number of its items."""

    items: gl.tensor
    starts: gl.tensor
    shares: gl.tensor
    max_items: gl.tensor

    @gluon.jit
    def share(self):
        """Return this program's (first tile, end of its tiles, item of the first tile)."""
        share = self.shares + SHARE_WORDS * gl.program_id(0)
        return gl.load(share + FIRST_TILE), gl.load(share + SHARE_WORDS + FIRST_TILE), gl.load(share + FIRST_ITEM)

    @gluon.jit
    def item(self, number, share_end):
        words = self.items + ITEM_WORDS * number
        end = gl.minimum(gl.load(self.starts + number + 1), share_end)
        start = gl.load(self.starts + number)
        visible = gl.load(words + NUM_VISIBLE)
        keys = visible + gl.load(words + NUM_QUERIES) - 1
        return Item(start, end, gl.load(words + FIRST_TOKEN), visible, keys, gl.load(words + TABLE_ROW))


@record
class AbsorbedParts:
    """The workspace for parts of results: see `combine.combine`."""

    sums: gl.tensor
    softmax: gl.tensor  # top score and weight of each row
    arrivals: gl.tensor


@record
class AbsorbedOutput:
    """The results of the step."""

    out: gl.tensor
    num_heads: Value
    parts: AbsorbedParts


@record
class Padding:
    """The padding among the first `num_tokens` tokens: those of slot -1, whose rows are zeroed."""

    out: gl.tensor
    slots: gl.tensor
    num_tokens: gl.tensor
    num_heads: Value

    @gluon.jit
    def clear(self, first_head, shape):
        """Zero a group of heads of padding tokens, which are in no item. A warp of every program does some of them."""
        dim = gl.arange(0, shape.RANK, gl.BlockedLayout([8], [32], [1], [0]))
        token = gl.program_id(0)
        while token < self.num_tokens:
            if gl.load(self.slots + token) < 0:
                place = self.out + (token.to(gl.int64) * self.num_heads + first_head) * shape.RANK + dim
                for row in range(gl.minimum(self.num_heads - first_head, shape.HEADS)):
                    gl.store(place + row * shape.RANK, gl.zeros_like(dim).to(self.out.dtype.element_ty))
            token += gl.num_programs(0)


@gluon.jit
def finish(found, item, tile, end, work, output, shape):
    """Write the result `found` of an item, or store it as a part: it covers the item's tiles from `tile` to `end`."""
    token = gl.load(work.items + ITEM_WORDS * item + FIRST_TOKEN)
    item_start, item_end = gl.load(work.starts + item), gl.load(work.starts + item + 1)
    if (tile == item_start) & (end == item_end):
        _write(found, token, gl.load(work.items + ITEM_WORDS * item + NUM_QUERIES), output, shape.SUMS, shape)
    else:
        _store_part(found, output.parts, tile == item_start, shape)
        if not shape.APART:
            _combine_if_last(item_start, item_end, token, work, output, shape)


@gluon.jit
def _write(found, token, num_queries, output, LAYOUT: gl.constexpr, shape):
    """Write the heads of a group of `num_queries` tokens from `token` on."""
    out, num_heads = output.out, output.num_heads
    row = columns(shape.ROWS, LAYOUT)
    query = row // shape.HEADS
    head = gl.program_id(1) * shape.HEADS + row % shape.HEADS
    place = ((token + query).to(gl.int64) * num_heads + head) * shape.RANK
    result = found.sums / gl.expand_dims(found.weight, 0)
    is_query = gl.expand_dims((query < num_queries) & (head < num_heads), 0)
    gl.store(out + gl.expand_dims(place, 0) + dims(shape.RANK, LAYOUT), result.to(out.dtype.element_ty), mask=is_query)


@gluon.jit
def _places_of_part(parts, program, begins, head_group, LAYOUT: gl.constexpr, shape):
    """Return pointers to `program`'s part of the item that `begins` in its share, or of the one that began earlier."""
    row, dim = columns(shape.ROWS, LAYOUT), dims(shape.RANK, LAYOUT)
    number = head_group * gl.num_programs(0) + program
    part = (number.to(gl.int64) * 2 + begins.to(gl.int32)) * shape.ROWS + row
    place = parts.sums + gl.expand_dims(part * shape.RANK, 0) + dim
    return Partial(place, parts.softmax + 2 * part + 1, parts.softmax + 2 * part)


@gluon.jit
def _store_part(found, parts, begins, shape):
    places = _places_of_part(parts, gl.program_id(0), begins, gl.program_id(1), shape.SUMS, shape)
    gl.store(places.sums, found.sums)
    gl.store(places.top, found.top)
    gl.store(places.weight, found.weight)


@gluon.jit
def _combine_if_last(start, end, token, work, output, shape):
    """Combine and write the item of tiles `start` to `end`, in the order of its keys, if all other parts are stored."""
    parts = output.parts
    SPREAD: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, 4], [0, 1])
    AT_ONCE: gl.constexpr = PARTS_IN_REGISTERS // shape.ROWS
    first, last = programs_of(start, end, gl.load(work.starts + work.max_items), gl.num_programs(0))
    if is_last_to_arrive(parts.arrivals + gl.program_id(1) * gl.num_programs(0) + first, last - first):
        stored = StoredParts(parts, gl.program_id(1), first, last, shape.ROWS)
        merged = merge_stored(stored, _places_of_part, shape, shape.RANK, AT_ONCE, SPREAD)
        _write(merged, token, shape.QUERIES, output, SPREAD, shape)
