"""The batch that the device has in its tables, so that only what differs from it is written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ...core.step import Chunk
from .shapes import StepShape
from .tables import DeviceTables, StagedWrites


class CurrentBatch:
    """Rows of the step, where each begins, and which draw a token.

    A step moves `starts` on by itself. So a step of the same rows, each begun where it ended in the step before, needs
    nothing written: the steady state of decoding.

    Behind the last sequence all rows are -1, whatever size a captured step fills itself up to.
    """

    def __init__(self, tables: DeviceTables, writes: StagedWrites) -> None:
        self._tables = tables
        self._writes = writes
        self.rows: list[int] = []
        self.ends: list[int] = []  # tokens of each row whose KV exists after the step
        self.samples: list[bool] = []

    def set(self, chunks: Sequence[Chunk], lens: Sequence[int], shape: StepShape) -> None:
        """The next step's, on a device that fills it up to `shape`."""
        rows = [chunk.row for chunk in chunks]
        starts = [chunk.start for chunk in chunks]
        samples = [chunk.samples for chunk in chunks]
        if rows != self.rows or starts != self.ends or samples != self.samples:
            self._write(rows, starts, samples)
        if not shape.is_decode:
            self._write_query_start(lens, shape.num_seqs)
        self.rows, self.samples = rows, samples
        self.ends = [start + length for start, length in zip(starts, lens, strict=True)]

    def _write(self, rows: list[int], starts: list[int], samples: list[bool]) -> None:
        tables, add = self._tables, self._writes.add
        add(tables.rows.address(0), rows + [-1] * (len(self.rows) - len(rows)))
        add(tables.starts.address(0), starts)
        add(tables.samples.address(0), samples)

    def _write_query_start(self, lens: Sequence[int], padded: int) -> None:
        query_start = list(accumulate(lens, initial=0))
        query_start += query_start[-1:] * (padded - len(lens))
        self._writes.add(self._tables.query_start.address(0), query_start)
