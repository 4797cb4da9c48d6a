"""Programs that start at the same time and work one after the other, as measurements on one device must.

A program that has started calls `wait_for_turn`; what it prints then, lines of JSON, is its result. The program that
starts others makes a `Started` of each.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

READY, GO = "READY", "go"
ENDS_S = 60.0  # for a program that has nothing to do any more to end by itself
CLEANS_UP_S = 300.0  # for one that was told to end: it may have servers of its own to end, one after the other


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
        self._is_terminated = False

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
        stop = threading.Timer(most_s or threading.TIMEOUT_MAX, self._terminate)
        stop.daemon = True
        stop.start()
        try:
            return [json.loads(line) for line in self._lines() if line.startswith("{")]
        finally:
            stop.cancel()

    def end(self) -> None:
        """Wait until it has ended; if it does not, terminate it, and at last kill it.

        A program that `work` has terminated is not terminated again: it cleans up, and a second SIGTERM would end it
        at once.
        """
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it was not told any more
            self.process.stdin.close()
        if not self._is_terminated and not self._ends_within(ENDS_S):
            self._terminate()
        if not self._ends_within(CLEANS_UP_S):
            self.process.kill()
            self.process.wait()

    def _terminate(self) -> None:
        self._is_terminated = True
        self.process.terminate()

    def _ends_within(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

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
