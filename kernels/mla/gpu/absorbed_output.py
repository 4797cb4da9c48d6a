"""The work of absorbed MLA for Hopper: the items in a program's share, and where their results go.

    the share has the whole item     its result is complete
    the share has a piece of it      its result is a part, with its log-sum-exp            see `partial_results`

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from baton.kernels.hopper.rings import Value, barrier, record

from .partial_results import part_row
from .work_list import (
    FIRST_ITEM,
    FIRST_TILE,
    FIRST_TOKEN,
    ITEM_WORDS,
    NUM_CACHED,
    NUM_QUERIES,
    NUM_VISIBLE,
    SHARE_WORDS,
    TABLE_ROW,
)


@record
class Item:
    """An item (query tokens and their keys), and its tiles in this program's share."""

    first: gl.tensor  # its first tile in the share, counted from its first tile
    tiles: gl.tensor  # number of its tiles in the share
    is_whole: gl.tensor  # the share has all of its tiles
    token: gl.tensor  # its first query token
    num_queries: gl.tensor
    num_visible: gl.tensor  # number of keys that the first token sees
    num_keys: gl.tensor  # number of keys that the last token sees
    num_cached: gl.tensor  # number of keys that earlier steps have written
    table_row: gl.tensor


@record
class Work:
    """Pointers to the fields of `work_list.WorkList`."""

    items: gl.tensor
    starts: gl.tensor
    shares: gl.tensor

    @gluon.jit
    def share(self):
        """Return this program's (first tile, end of its tiles, an item at or before the first tile)."""
        share = self.shares + SHARE_WORDS * gl.program_id(0)
        return gl.load(share + FIRST_TILE), gl.load(share + SHARE_WORDS + FIRST_TILE), gl.load(share + FIRST_ITEM)

    @gluon.jit
    def item_with(self, tile, number):
        """Return the number of the item that has `tile`: `number`, or a later one if items without tiles come first."""
        while gl.load(self.starts + number + 1) <= tile:
            number += 1
        return number

    @gluon.jit
    def item(self, number, tile, share_end):
        """Return an item, of which the share has the tiles from `tile` on."""
        words = self.items + ITEM_WORDS * number
        start, end = gl.load(self.starts + number), gl.load(self.starts + number + 1)
        queries, visible = gl.load(words + NUM_QUERIES), gl.load(words + NUM_VISIBLE)
        return Item(
            tile - start,
            gl.minimum(end, share_end) - tile,
            (tile == start) & (end <= share_end),
            gl.load(words + FIRST_TOKEN),
            queries,
            visible,
            visible + queries - 1,
            gl.load(words + NUM_CACHED),
            gl.load(words + TABLE_ROW),
        )


@record
class Results:
    """Pointers to the fields of `partial_results.PartialResults`."""

    rows: gl.tensor  # [num_whole_rows, RANK], and behind them the parts
    lse: gl.tensor
    num_whole_rows: gl.tensor
    num_heads: Value


@gluon.jit
def store_rows(memory, first_dim, item, results, shape):
    """Write result rows from shared memory [ROWS, COLUMNS], dimensions from `first_dim` on, 16 bytes per thread.

    Four warps do it.
    """
    COLUMNS: gl.constexpr = memory.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    barrier()  # all warps have written the memory
    row = gl.arange(0, shape.ROWS, gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    query, head, first_head = row // shape.HEADS, row % shape.HEADS, gl.program_id(1) * shape.HEADS
    first_row = results.num_whole_rows + _first_part_row(item, shape)
    first_row = gl.where(item.is_whole, item.token.to(gl.int64) * results.num_heads + first_head, first_row)
    row = gl.where(item.is_whole, query * results.num_heads + head, row)
    exists = (query < item.num_queries) & (first_head + head < results.num_heads)
    place = results.rows + (first_row * shape.RANK + first_dim) + gl.expand_dims(row * shape.RANK, 1)
    gl.store(place + gl.expand_dims(dim, 0), memory.load(LAYOUT), mask=gl.expand_dims(exists, 1))


@gluon.jit
def store_lse(top, weight, item, results, LAYOUT: gl.constexpr, shape):
    """Write the log-sum-exp of a part's rows, whose top scores and sums of weights [ROWS] have this layout."""
    if not item.is_whole:
        row = gl.arange(0, shape.ROWS, LAYOUT)
        gl.store(results.lse + _first_part_row(item, shape) + row, top + gl.log2(weight))


@gluon.jit
def _first_part_row(item, shape):
    begins = (item.first == 0).to(gl.int32)
    return part_row(gl.program_id(0), begins, gl.program_id(1), gl.num_programs(0), 0, shape.ROWS)
