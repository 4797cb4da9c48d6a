"""The compiler of grammars as its engine sees it: a process, started when it is needed, and again when it broke."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import IO

import msgspec

from ..core.grammar import GrammarRefused
from ..core.sampling import StructuredOutputsParams
from .frames import Compiled, Limits, Ready, Refused, Setup, Vocabulary, read_frame, write_frame


class CompilerFailed(Exception):
    """The compiler does not start."""


class CompilerClosed(CompilerFailed):
    """Its engine has ended."""

    def __init__(self) -> None:
        super().__init__("the engine has ended")


class GrammarCompiler:
    """Threads wait for each other. Ends with this process, or with `close`."""

    def __init__(self, vocabulary: Vocabulary, limits: Limits = Limits()) -> None:
        self._setup = Setup(vocabulary, limits)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._tokenizer_info = ""
        self._closed = False

    def tokenizer_info(self) -> str:
        """xgrammar's, serialized. Raises `GrammarRefused` for tokenizers without bytes, and `CompilerFailed`."""
        with self._lock:
            self._running()
            return self._tokenizer_info

    def compile(self, asked: StructuredOutputsParams) -> str:
        """xgrammar's compiled grammar, serialized. Raises `GrammarRefused` and `CompilerFailed`."""
        with self._lock:
            process = self._running()
            reply = _ask(process, asked)
            if reply is None:
                raise GrammarRefused(f"{asked.kind} {self._why_ended()}")
        if isinstance(reply, Refused):
            raise GrammarRefused(reply.reason)
        assert isinstance(reply, Compiled)
        return reply.grammar

    def close(self) -> None:
        """What is being compiled is given up."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._closed:
            raise CompilerClosed
        # A session of its own: an interrupt from the keyboard is this process's business.
        command = [sys.executable, "-m", "baton.engine.structured.compiling"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._process = process  # before the next look at `_closed`: either `close` finds it, or it is ended here
        reply = None if self._closed else _ask(process, self._setup)
        if not isinstance(reply, Ready):
            process.kill()
            status = process.wait()
            if isinstance(reply, Refused):
                raise GrammarRefused(reply.reason)
            if self._closed:
                raise CompilerClosed
            raise CompilerFailed(f"the compiler of grammars ended with status {status}; its output says why")
        self._tokenizer_info = reply.tokenizer_info
        return process

    def _why_ended(self) -> str:
        assert self._process is not None
        status, limits = self._process.wait(), self._setup.limits
        self._process = None
        if status == -signal.SIGALRM:
            return f"takes longer than {limits.compile_s} s to compile: simplify it"
        return f"breaks its compiler, or needs more than {limits.memory_bytes >> 20} MiB to compile: simplify it"


def _ask(process: subprocess.Popen[bytes], message: msgspec.Struct) -> Ready | Compiled | Refused | None:
    """None: the process has ended."""
    try:
        write_frame(_pipe(process.stdin), message)
    except OSError:
        return None
    reply = read_frame(_pipe(process.stdout))
    return None if reply is None else msgspec.msgpack.decode(reply, type=Ready | Compiled | Refused)


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
