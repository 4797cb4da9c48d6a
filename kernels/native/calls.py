"""C functions that are callable from Python, and recorders of such calls."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

POINTER, I64, INT, F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class ROWS(ctypes.c_int64):
    """The argument type of a number of rows. A recorded graph may be replayed with fewer rows."""


class NativeFunction:
    """A C function with declared argument types. While a thread records, its calls are recorded instead of made."""

    __slots__ = ("_arguments", "_declared", "_of_words", "name")

    def __init__(self, library: ctypes.CDLL, name: str, arguments: Sequence[type], returns: type | None) -> None:
        self.name = name
        self._arguments = tuple(arguments)
        self._declared = library[name]  # a new object, so that the declarations of two callers do not mix
        self._declared.argtypes = arguments
        self._declared.restype = returns
        self._of_words = getattr(library, f"{name}_of_words", None)  # see native/cpu_graph.h

    def __call__(self, *given: Any) -> int | None:
        notes = _thread.notes
        if notes is not None:
            notes.add(self, given)
            return None
        answer: int | None = self._declared(*given)
        return answer

    @property
    def address_of_words(self) -> int | None:
        """The address of the variant that takes its arguments as words (`BATON_RECORDABLE`), or None."""
        return None if self._of_words is None else ctypes.cast(self._of_words, POINTER).value

    @property
    def row_words(self) -> list[int]:
        """The indices of its arguments that are `ROWS`."""
        return [index for index, kind in enumerate(self._arguments) if kind is ROWS]

    def words(self, given: Sequence[Any]) -> list[int]:
        return [_word(kind, value) for kind, value in zip(self._arguments, given, strict=True)]


class NotRecordable(Exception):
    """A recorded run does something that a CPU graph cannot repeat. The message names the operation."""


class RecordedCall(NamedTuple):
    address: int  # the function's address
    words: list[int]  # its arguments
    row_words: list[int]  # those that are `ROWS`


class CallRecorder:
    """Records the native calls of one thread within `with recorder:`, in order, without making them."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.given: list[Sequence[Any]] = []  # the arguments, to keep arrays among them alive

    def __enter__(self) -> CallRecorder:
        assert _thread.notes is None, "a thread notes its calls once"
        _thread.notes = self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.notes = None

    def add(self, function: NativeFunction, given: Sequence[Any]) -> None:
        """Record a call. Raises `NotRecordable` for a function without a variant that takes words."""
        address = function.address_of_words
        if address is None:
            raise NotRecordable(function.name)
        self.calls.append(RecordedCall(address, function.words(given), function.row_words))
        self.given.append(given)


class _Thread(threading.local):
    notes: CallRecorder | None = None


_thread = _Thread()


def _word(kind: type, value: Any) -> int:
    if kind is F32:
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        return int(bits)
    if isinstance(value, ctypes.Array):
        return ctypes.addressof(value)
    return int(value) % (1 << 64)
