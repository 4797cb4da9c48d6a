"""The processes that an `LLM` of several ranks has started, as the operating system lists them."""

from __future__ import annotations

import os
import time
from pathlib import Path

SOON_S = 30.0  # within this time a failure is reported and all processes have ended


def members(parent: int | None = None) -> list[int]:
    """Return the member processes that this process (or `parent`) has started, oldest first."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            status = (process / "stat").read_text().rpartition(")")[2].split()
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if int(status[1]) == (parent or os.getpid()) and status[0] != "Z" and b"offline.local_members" in command:
            found.append(int(process.name))
    return sorted(found)


def assert_members_end(but: set[int] | None = None) -> None:
    """Wait until no member processes are left except `but`; fail if that takes too long."""
    deadline = time.monotonic() + SOON_S
    while left := set(members()) - (but or set()):
        assert time.monotonic() < deadline, f"processes {left} are still there"
        time.sleep(0.02)


def cpu_seconds(pids: list[int]) -> float:
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(user) + int(system) for user, system in (each[11:13] for each in fields)) / os.sysconf("SC_CLK_TCK")
