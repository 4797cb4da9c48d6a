"""CPU graphs: sequences of native calls, recorded once and replayed without Python between them.

    recording = record(run, workspace)      records the native calls of `run`; nothing is computed
    recording.graph.replay()                makes the calls, any number of times

Arguments are addresses. The caller keeps the memory of inputs alive, and changes its contents. Memory that `run`
allocates is in the workspace, and `recording.answer` is the output.

A graph can be replayed with fewer rows. `record(run, workspace, sizes)` gets the recorded numbers of rows, all
different, and `replay(*sizes)` the actual ones. Calls with `ROWS` arguments compute only these rows; other calls
compute all recorded rows, and the caller ignores the surplus.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from baton.kernels import native

from .calls import CallRecorder, NotRecordable

_LEAST_BYTES = 64


class Workspace:
    """The memory that several recorded runs allocate from. Only one of them runs at a time, and keeps only its answer.

    A piece is reused once no tensor refers to it, within a run and in the next one.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)  # by size

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        free = self._free[1 << (max(num_bytes, _LEAST_BYTES) - 1).bit_length()]
        piece = free.pop() if free else self._new(num_bytes)
        lent = piece[:]  # garbage-collected with the last tensor in it
        weakref.finalize(lent, free.append, piece).atexit = False
        return torch.from_numpy(lent)[:num_bytes].view(dtype).view(tuple(shape))

    @staticmethod
    def _new(num_bytes: int) -> NDArray[np.uint8]:
        size = 1 << (max(num_bytes, _LEAST_BYTES) - 1).bit_length()
        return torch.empty(size, dtype=torch.uint8).numpy()  # by torch, whose memory begins at a cache line


class CpuGraph:
    """A recorded list of native calls."""

    def __init__(self, notes: CallRecorder, workspace: Workspace, sizes: Sequence[int]) -> None:
        self._points_into = (notes, workspace)
        starts = [0, *accumulate(len(call.words) for call in notes.calls)]
        self._words = np.array([word for call in notes.calls for word in call.words], np.uint64)
        rows = [start + index for start, call in zip(starts, notes.calls, strict=False) for index in call.row_words]
        self._rows_of = [np.array([at for at in rows if self._words[at] == size], np.int64) for size in sizes]
        self._sizes = tuple(sizes)
        first = self._words.ctypes.data
        calls = [(call.address, first + 8 * start) for start, call in zip(starts, notes.calls, strict=False)]
        self._calls = np.array(calls, np.uint64)
        self._address = self._calls.ctypes.data
        replay = native.function("baton_replay", native.POINTER, native.I64)
        assert replay is not None, "calls were noted, so the library is there"
        self._replay = replay

    def replay(self, *sizes: int) -> None:
        """Make the calls, without the GIL. Each of `sizes` is at most the recorded one."""
        if sizes != self._sizes:
            self._sizes = sizes
            for rows, size in zip(self._rows_of, sizes, strict=True):
                self._words[rows] = size
        self._replay(self._address, len(self._calls))


@dataclass(frozen=True)
class Recording:
    answer: Tensor  # the result of `run`; undefined before the first replay
    graph: CpuGraph


def record(run: Callable[[], Tensor], workspace: Workspace, sizes: Sequence[int] = ()) -> Recording:
    """Record the native calls of `run`.

    Raises `NotRecordable` at the first operation that is no native call, allocation or view.
    """
    assert len(set(sizes)) == len(sizes), "rows are told apart by their number"
    with CallRecorder() as notes, _Watch(workspace):
        answer = run()
    return Recording(answer, CpuGraph(notes, workspace, sizes))


class _Watch(TorchDispatchMode):
    """Intercepts torch operations: allocations use the workspace, views are allowed, everything else is refused."""

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()
        self._workspace = workspace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return false, since to skip its compiler, torch would first import it, which takes a second."""
        return False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation is torch.ops.aten.empty.memory_format:
            return self._workspace.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if not operation.is_view:
            raise NotRecordable(str(operation))
        answer = operation(*args, **kwargs)
        if not _memory_of(answer) <= _memory_of(args):  # some view operations copy if they have to
            raise NotRecordable(str(operation))
        return answer


def _memory_of(values: Any) -> set[int]:
    """Return the addresses of the storages of all tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(values)}


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
