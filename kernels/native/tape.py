"""What is computed by native calls alone, computed with no Python between them.

    recording = record(run, workspace)      notes the calls that it asks for; nothing is computed
    recording.tape.replay()                 makes them, one after another; and again

Arguments are addresses. What lies there is the caller's to keep and to change; what `run` allocated lies in the
workspace, and `recording.answer` holds what comes out.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from baton.kernels import native

from .calls import CallNotes, Obstacle

_LEAST_BYTES = 64


class Workspace:
    """Memory of what several recorded runs allocate: one of them runs at a time, and keeps only its answer.

    A piece is given out again once nothing refers to it, within a run and in the next.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)  # by size

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        free = self._free[1 << (max(num_bytes, _LEAST_BYTES) - 1).bit_length()]
        piece = free.pop() if free else self._new(num_bytes)
        lent = piece[:]  # dies with the last tensor that lies in it
        weakref.finalize(lent, free.append, piece).atexit = False
        return torch.from_numpy(lent)[:num_bytes].view(dtype).view(tuple(shape))

    @staticmethod
    def _new(num_bytes: int) -> NDArray[np.uint8]:
        size = 1 << (max(num_bytes, _LEAST_BYTES) - 1).bit_length()
        return torch.empty(size, dtype=torch.uint8).numpy()  # torch's own begin at a cache line


class Tape:
    """Calls to make."""

    def __init__(self, notes: CallNotes, workspace: Workspace) -> None:
        self._points_into = (notes, workspace)
        self._words = [np.array(words, np.uint64) for _, words in notes.calls]
        calls = [(address, words.ctypes.data) for (address, _), words in zip(notes.calls, self._words, strict=True)]
        self._calls = np.array(calls, np.uint64)
        self._address = self._calls.ctypes.data
        replay = native.function("baton_replay", native.POINTER, native.I64)
        assert replay is not None, "calls were noted, so the library is there"
        self._replay = replay

    def replay(self) -> None:
        """The interpreter's lock is released meanwhile."""
        self._replay(self._address, len(self._calls))


@dataclass(frozen=True)
class Recording:
    answer: Tensor  # what `run` returned: holds nothing before the first replay
    tape: Tape


def record(run: Callable[[], Tensor], workspace: Workspace) -> Recording:
    """Raises `Obstacle` at the first thing that is no native call, no allocation and no view."""
    with CallNotes() as notes, _Watch(workspace):
        answer = run()
    return Recording(answer, Tape(notes, workspace))


class _Watch(TorchDispatchMode):
    """Sees every operation of torch: allocations go to the workspace, and views of what is there are harmless."""

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()
        self._workspace = workspace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks. To skip its compiler it would import that first, which takes a second."""
        return False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation is torch.ops.aten.empty.memory_format:
            return self._workspace.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if not operation.is_view:
            raise Obstacle(str(operation))
        answer = operation(*args, **kwargs)
        if not _memory_of(answer) <= _memory_of(args):  # some copy where they cannot do without
            raise Obstacle(str(operation))
        return answer


def _memory_of(values: Any) -> set[int]:
    """Where the storages of all tensors begin."""
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(values)}


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
