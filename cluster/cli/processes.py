"""Finds the processes that a command started, through /proc, so that none of them outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Process:
    """A process, identified by its id and its start time: a later process may have the same id."""

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process with this id, or None if there is none."""
        found = _read_stat(pid)
        return None if found is None else found[1]

    def alive(self) -> bool:
        found = _read_stat(self.pid)
        return found is not None and found[1] == self and found[2] != "Z"


def descendants(pid: int) -> list[Process]:
    """Return all processes below `pid`, parents first."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := _read_stat(int(entry.name))) is not None:
            children[found[0]].append(found[1])
    below, queue = [], list(children[pid])
    while queue:
        process = queue.pop(0)
        below.append(process)
        queue.extend(children[process.pid])
    return below


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that `descendants` still finds them."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def children() -> set[int]:
    """Return the ids of this process's children."""
    found = (_read_stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {process.pid for parent, process, _ in filter(None, found) if parent == os.getpid()}


def reap_orphans(own: Container[int]) -> None:
    """Let go of adopted processes that have ended. Children of `own` are left to what started them in this process.

    The kernel names the oldest first, so one of `own` that has ended, and that nothing waits for, keeps the others.
    """
    with contextlib.suppress(ChildProcessError):  # there are no children
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)


def kill_below(pid: int, timeout_s: float) -> None:
    """Kill all processes below `pid`, including those that start meanwhile.

    After `timeout_s` seconds, give up on processes that cannot die because the kernel holds them, as in a driver.
    """
    deadline_s = time.monotonic() + timeout_s
    while (alive := [process for process in descendants(pid) if process.alive()]) and time.monotonic() < deadline_s:
        kill(alive)
        wait_until_gone(alive, POLL_S)


def wait_until_gone(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Wait for processes to end; return those that still exist after `timeout_s` seconds."""
    deadline_s = time.monotonic() + timeout_s
    left = [process for process in processes if process.alive()]
    while left and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        left = [process for process in left if process.alive()]
    return left


def kill(processes: Iterable[Process]) -> None:
    """Kill processes; one that has ended already is ignored."""
    for process in processes:
        if process.alive():
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _read_stat(pid: int) -> tuple[int, Process, str] | None:
    """Return the parent's id, the process, and its state; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent, *rest = stat.rpartition(")")[2].split()  # the name in parentheses may contain anything
    return int(parent), Process(pid, int(rest[17])), state
