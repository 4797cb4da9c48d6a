"""Client of a grammar compiler process. It starts the process when needed, and again after a failure."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, NoReturn

import msgspec

from ..core.grammar import GrammarRefused
from ..core.sampling import StructuredOutputsParams
from .compiler_messages import (
    CompiledReply,
    CompileLimits,
    CompilerReady,
    CompilerSetup,
    GrammarVocabulary,
    RefusedReply,
    read_frame,
    write_frame,
)

LOOK_MS = 200  # interval of checks whether a request still waits for the grammar


class CompilerFailed(Exception):
    """The compiler process could not be started."""


class CompilerClosed(CompilerFailed):
    """The engine has ended."""

    def __init__(self) -> None:
        super().__init__("the engine has ended")


class CompilesTooSlowly(Exception):
    """A grammar took longer to compile than its limit."""


class Abandoned(Exception):
    """Every request that asked for this grammar has ended."""

    def __init__(self) -> None:
        super().__init__("no request waits for this grammar any more")


def always() -> bool:
    return True


class GrammarCompiler:
    """One compiler process. A thread must hold its `turn` to use it. It ends with this process, or with `close`."""

    def __init__(self, vocabulary: GrammarVocabulary, limits: CompileLimits = CompileLimits()) -> None:
        self._setup = CompilerSetup(vocabulary, limits)
        self.compile_s = 0.0  # seconds that threads spent in `compile`
        self._turns = FifoLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._tokenizer_info = ""
        self._closed = False

    def turn(self) -> AbstractContextManager[None]:
        """Return a context manager that holds the compiler's lock. Threads get it first come, first served."""
        return self._turns.turn()

    @property
    def num_in_line(self) -> int:
        """The number of threads that hold the turn or wait for it."""
        return self._turns.num_in_line

    @property
    def process_id(self) -> int | None:
        """The id of the process; None before the first grammar, and after a limit has ended the process."""
        return None if self._process is None else self._process.pid

    def tokenizer_info(self) -> str:
        """Return xgrammar's serialized tokenizer info.

        Raises `GrammarRefused` for tokenizers whose tokens have no fixed bytes, and `CompilerFailed`.
        """
        self._running()
        return self._tokenizer_info

    def compile(self, asked: StructuredOutputsParams, is_wanted: Callable[[], bool] = always) -> str:
        """Return xgrammar's serialized grammar.

        Raises `GrammarRefused`, `CompilesTooSlowly`, `CompilerFailed`, and `Abandoned` soon after `is_wanted` returns
        False.
        """
        if not is_wanted():
            raise Abandoned
        began_s = time.monotonic()
        try:
            reply = _ask(self._running(), asked, is_wanted)
            if reply is None:
                self._raise_why(is_wanted)
        finally:
            self.compile_s += time.monotonic() - began_s
        if isinstance(reply, RefusedReply):
            raise GrammarRefused(reply.reason, reply.place)
        assert isinstance(reply, CompiledReply)
        return reply.grammar

    def stop(self) -> None:
        """End the process. The next grammar starts a new one."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Abort the grammar that is being compiled, and refuse further ones."""
        self._closed = True
        self.stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._closed:
            raise CompilerClosed
        # In a session of its own, so that Ctrl-C reaches this process only.
        command = [sys.executable, "-m", "baton.engine.structured.compiler_process"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._process = process  # set before `_closed` is read: so either `close` or this method ends the process
        reply = None if self._closed else _ask(process, self._setup)
        if not isinstance(reply, CompilerReady):
            process.kill()
            status = process.wait()
            if isinstance(reply, RefusedReply):
                raise GrammarRefused(reply.reason, detail=reply.detail)
            if self._closed:
                raise CompilerClosed
            raise CompilerFailed(f"the compiler of grammars ended with status {status}; its output says why")
        self._tokenizer_info = reply.tokenizer_info
        return process

    def _raise_why(self, is_wanted: Callable[[], bool]) -> NoReturn:
        """Raise the reason why the process sent no reply."""
        assert self._process is not None
        status, limits = self._process.wait(), self._setup.limits
        self._process = None
        if status == -signal.SIGALRM:
            raise CompilesTooSlowly(f"takes longer than {limits.compile_s} s to compile: simplify it")
        if not is_wanted():
            raise Abandoned
        cause = (
            f"crashes the grammar compiler, or needs more than {limits.memory_bytes >> 20} MiB to compile: simplify it"
        )
        raise GrammarRefused(cause)


def _ask(
    process: subprocess.Popen[bytes], message: msgspec.Struct, is_wanted: Callable[[], bool] = always
) -> CompilerReady | CompiledReply | RefusedReply | None:
    """Return the reply; None if the process has ended. It is ended here once no request wants the reply any more."""
    try:
        write_frame(_pipe(process.stdin), message)
    except OSError:
        return None
    replies = _pipe(process.stdout)
    poll = select.poll()
    poll.register(replies, select.POLLIN)
    while not poll.poll(LOOK_MS):
        if not is_wanted():
            process.kill()
    reply = read_frame(replies)
    return None if reply is None else msgspec.msgpack.decode(reply, type=CompilerReady | CompiledReply | RefusedReply)


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


class FifoLock:
    """A first-come-first-served lock, which Python's locks do not guarantee to be. Not reentrant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: deque[threading.Event] = deque()  # the first holds the lock

    @property
    def num_in_line(self) -> int:
        return len(self._line)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock."""
        mine = threading.Event()
        with self._lock:
            self._line.append(mine)
            self._line[0].set()
        mine.wait()
        try:
            yield
        finally:
            with self._lock:
                self._line.popleft()
                if self._line:
                    self._line[0].set()
