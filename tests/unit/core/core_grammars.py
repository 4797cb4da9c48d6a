"""Fake grammars over tokens, and executors for them that work when a test says so."""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from baton.engine.core.grammar import GrammarRefused, GrammarStats, LookAhead
from baton.engine.core.sampling import StructuredOutputsParams

NUM_TOKENS = 50
_MASK = struct.Struct("<qq")


def allowed_after(output: Sequence[int]) -> list[int]:
    """Return the tokens that may follow an output: three of four, and now and then a single one."""
    last, length = output[-1] if output else 0, len(output)
    if hash((last, length)) % 5 == 0:
        return [hash((last, 1, length)) % NUM_TOKENS]
    return [token for token in range(NUM_TOKENS) if hash((last, token)) % 4]


def draw_allowed(token: int, output: Sequence[int]) -> int:
    """Return the token that is drawn after an output, if `token` would be drawn without a grammar."""
    return min(allowed_after(output), key=lambda each: (each - token) % NUM_TOKENS)


def made_for(mask: bytes) -> int:
    """Return the hash of the output for which a grammar made this mask."""
    output: int = _MASK.unpack(mask)[1]
    return output


class FakeGrammar:
    """A grammar that allows what `allowed_after` says, or all of it but token 0. A mask ends with its output's hash.

    It accepts only tokens that it allows, except for those drawn before it was opened.
    """

    def __init__(self, source: FakeGrammars) -> None:
        self._source = source
        self._is_open = False
        self.tokens: list[int] = []

    def advance(self, token_ids: Sequence[int]) -> bytes:
        assert self._source.may_advance.wait(30.0)
        for token in token_ids:
            assert not self._is_open or token in allowed_after(self.tokens), f"{token} behind {self.tokens}"
            self.tokens.append(token)
        self._is_open = True
        if self._source.refuse_at is not None and len(self.tokens) >= self._source.refuse_at:
            raise GrammarRefused("not this one")
        return self._mask(self.tokens)

    def look_ahead(self, guesses: Sequence[int], most: int) -> LookAhead:
        assert most > 0
        output, rest = [*self.tokens], [*guesses]
        masks: list[bytes] = []
        while len(masks) < most:
            allowed = allowed_after(output)
            if rest and rest[0] in allowed:
                output.append(rest.pop(0))
            elif len(allowed) == 1:
                output.append(allowed[0])
                rest = []
            else:
                break
            masks.append(self._mask(output))
        return LookAhead(output[len(self.tokens) :], masks)

    def _mask(self, output: Sequence[int]) -> bytes:
        bits = sum(1 << token for token in allowed_after(output) if token or self._source.allows_0)
        return _MASK.pack(bits, hash(tuple(output)))


class FakeGrammars:
    """A `GrammarSource` whose threads wait until a test lets them go on."""

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
        self.wanted: list[Callable[[], bool]] = []  # `is_wanted` of each grammar that was asked for
        self.asked = threading.Semaphore(0)  # released once for each

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


class ImmediateThreads(Executor):
    """An executor in place of the threads of `Constraints` that works when work is submitted."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*args, **kwargs))
        return future


class LateThreads(Executor):
    """An executor in place of the threads of `Constraints` that works when a test calls `work`."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, functools.partial(work, *args, **kwargs)))
        return future

    def work(self, index: int = 0) -> None:
        """Do a piece of the waiting work, unless it was cancelled."""
        future, work = self.waiting.pop(index)
        if future.set_running_or_notify_cancel():
            future.set_result(work())

    def begin(self) -> None:
        """Begin the oldest piece of work, and never end it."""
        future, _ = self.waiting.pop(0)
        assert future.set_running_or_notify_cancel()
