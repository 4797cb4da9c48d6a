"""XGrammarBackend that allow everything, and threads for them that work when a test says so."""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from baton.engine.core.grammar import GrammarRefused, GrammarStats
from baton.engine.core.sampling import StructuredOutputsParams

_MASK = struct.Struct("<qq")


def num_known(mask: bytes) -> int:
    """Tokens of the output that a grammar knew when it made this mask."""
    count: int = _MASK.unpack(mask)[1]
    return count


class FakeGrammar:
    """Allows every token, or all but number 0. Behind its masks stands how many tokens it knew when it made them."""

    def __init__(self, source: FakeGrammars) -> None:
        self._source = source
        self.tokens: list[int] = []

    def advance(self, token_ids: Sequence[int]) -> bytes:
        assert self._source.may_advance.wait(30.0)
        self.tokens += token_ids
        if len(self.tokens) == self._source.refuse_at:
            raise GrammarRefused("not this one")
        return _MASK.pack(-1 if self._source.allows_0 else -2, len(self.tokens))


class FakeGrammars:
    """A `GrammarSource` whose threads wait until they may go on."""

    def __init__(self) -> None:
        self.may_open = threading.Event()
        self.may_advance = threading.Event()
        self.may_open.set()
        self.may_advance.set()
        self.fail: Exception | None = None
        self.refuse_at: int | None = None
        self.allows_0 = True
        self.known: list[StructuredOutputsParams] = []
        self.opened: list[FakeGrammar] = []
        self.wanted: list[Callable[[], bool]] = []  # of each that was asked for
        self.asked = threading.Semaphore(0)  # one for each

    def knows(self, asked: StructuredOutputsParams) -> bool:
        return asked in self.known

    def open(self, asked: StructuredOutputsParams, is_wanted: Callable[[], bool]) -> FakeGrammar:
        self.wanted.append(is_wanted)
        self.asked.release()
        assert self.may_open.wait(30.0)
        if self.fail is not None:
            raise self.fail
        self.opened.append(FakeGrammar(self))
        return self.opened[-1]

    def stats(self) -> GrammarStats:
        return GrammarStats(num_compiled=len(self.opened))


class LateThreads(Executor):
    """In place of the threads of `Constraints`."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, functools.partial(work, *args, **kwargs)))
        return future

    def work(self, index: int = 0) -> None:
        """Does a piece of what waits, unless nobody wants it any more."""
        future, work = self.waiting.pop(index)
        if future.set_running_or_notify_cancel():
            future.set_result(work())

    def begin(self) -> None:
        """Begins the oldest piece, and never ends it."""
        future, _ = self.waiting.pop(0)
        assert future.set_running_or_notify_cancel()
