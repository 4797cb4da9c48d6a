"""Programs that start at the same time and work one after the other, as measurements on one device must.

A program that has started calls `wait_for_turn`; what it prints then, lines of JSON, is its result. The program that
starts others makes a `Started` of each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

READY, GO = "READY", "go"
ENDS_S = 60.0


@contextlib.contextmanager
def answers() -> Iterator[TextIO]:
    """Yield a stream for results, in place of standard output; what else is printed goes to standard error."""
    with os.fdopen(os.dup(1), "w", buffering=1) as stream:
        os.dup2(2, 1)
        yield stream


def wait_for_turn(stream: TextIO) -> bool:
    """Say that this program has started, and wait; False if it is not needed any more."""
    print(READY, file=stream)
    return sys.stdin.readline().strip() == GO


class Started:
    """A program that was started, and waits for its turn."""

    def __init__(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        pipe, variables = subprocess.PIPE, {**os.environ, **environment}
        with log.open("w") as errors:
            self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=errors, env=variables, text=True)

    def is_ready(self) -> bool:
        """Wait until it has started, or ended."""
        return any(line == READY for line in self._lines())

    def work(self, most_s: float | None = None) -> list[dict[str, Any]]:
        """Let it work, and return its results; those before its end if it fails, or takes longer than `most_s`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{GO}\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it ended while it waited
            return []
        stop = threading.Timer(most_s or threading.TIMEOUT_MAX, self.process.send_signal, [signal.SIGTERM])
        stop.daemon = True
        stop.start()
        try:
            return [json.loads(line) for line in self._lines() if line.startswith("{")]
        finally:
            stop.cancel()

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it was not told any more
            self.process.stdin.close()
        for tell in (lambda: None, self.process.terminate, self.process.kill):
            tell()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDS_S)
                return

    def _lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        return (line.strip() for line in self.process.stdout)


def take_turns(programs: Sequence[Started], most_s: float | None = None) -> Iterator[list[dict[str, Any]]]:
    """Wait until all programs have started, and yield the results of each, in order. All have ended afterwards.

    A program that has failed has no results. `most_s`: see `Started.work`.
    """
    try:
        ready = [program for program in programs if program.is_ready()]
        for program in programs:
            results = program.work(most_s) if program in ready else []
            program.end()
            yield results
    finally:
        for program in programs:
            program.end()
