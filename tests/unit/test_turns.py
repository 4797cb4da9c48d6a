"""The end of programs that take turns (`tools/turns.py`), with programs that ignore SIGTERM, or need long for it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tools import turns

# Notes each SIGTERM in the log, ends its output, and goes on.
STUBBORN = """
import os, signal, time

def note(*_):
    os.write(2, b"T")
    os.dup2(2, 1)

signal.signal(signal.SIGTERM, note)
print("READY", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "ENDS_S", 0.3)
    monkeypatch.setattr(turns, "CLEANS_UP_S", 0.3)


def started(log: Path, code: str) -> turns.Started:
    program = turns.Started([sys.executable, "-c", code], log, {})
    assert program.is_ready()
    return program


def test_a_program_that_is_not_needed_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "ENDS_S", 60.0)
    program = started(tmp_path / "log", "import sys; print('READY', flush=True); sys.exit(len(sys.stdin.read()))")
    program.end()
    assert program.process.returncode == 0


def test_a_program_that_does_not_end_is_terminated_once_and_then_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = started(log, STUBBORN)
    program.end()
    assert program.process.returncode == -signal.SIGKILL
    assert log.read_text() == "T"
    program.end()  # nothing happens


def test_a_program_that_was_terminated_in_its_turn_may_clean_up(tmp_path: Path) -> None:
    """A second SIGTERM would end it at once: `baton serve` kills everything at the second one."""
    log = tmp_path / "log"
    program = started(log, STUBBORN)
    assert program.work(most_s=0.01) == []
    program.end()
    assert program.process.returncode == -signal.SIGKILL
    assert log.read_text() == "T"
