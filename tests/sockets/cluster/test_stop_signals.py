"""Signals, and a closing terminal, end `baton serve`; here it starts no other processes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

from baton.cluster.cli.stop_signals import TolerantOutput, redirect_to_null

pytestmark = pytest.mark.timeout(60)

# A started program would inherit signals that were ignored or blocked when the tests began.
SIGNALLED = """
import signal, sys
signal.pthread_sigmask(signal.SIG_SETMASK, ())
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
from baton.cluster.cli.stop_signals import StopSignals
stop = StopSignals(lambda: print("killed", flush=True))
stop.listen()
signal.alarm(40)  # Ray's library, where it hears of SIGTERM first, orders an abort and calls whose handler was there
for number in sys.argv[2:]:
    signal.raise_signal(int(number))
print("asked" if stop.asked.is_set() else "not asked", flush=True)
terminated = str(int(signal.SIGTERM)) in sys.argv
sys.exit("an abort follows" if terminated and signal.alarm(0) else stop.code)
"""
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def after(*numbers: int, hangup: str = "SIG_DFL") -> tuple[str, int]:
    """Send these signals to a command; return its output and its exit code."""
    words = [sys.executable, "-c", SIGNALLED, hangup, *(str(int(number)) for number in numbers)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50)
    return done.stdout.strip(), done.returncode


@pytest.mark.parametrize(("number", "code"), [(INT, 130), (TERM, 0), (HUP, 129)])
def test_each_signal_asks_for_an_end_in_order_with_a_code_of_its_own(number: int, code: int) -> None:
    assert after(number) == ("asked", code)


@pytest.mark.parametrize(("first", "second"), [(INT, INT), (TERM, INT), (INT, TERM)])
def test_a_second_one_kills(first: int, second: int) -> None:
    assert after(first, second) == ("killed", 128 + second)


@pytest.mark.parametrize(
    ("numbers", "code"), [((HUP, HUP), 129), ((TERM, HUP), 0), ((HUP, TERM), 0), ((INT, HUP), 130)]
)
def test_a_hangup_is_never_the_second_one(numbers: tuple[int, ...], code: int) -> None:
    """A shell and the kernel both send SIGHUP; so does systemd with `SendSIGHUP`, besides SIGTERM."""
    assert after(*numbers) == ("asked", code)


def test_who_is_started_to_outlive_its_terminal_does() -> None:
    assert after(HUP, hangup="SIG_IGN") == ("not asked", 0)


def test_a_hangup_takes_the_terminal_away_and_nothing_else() -> None:
    """The last output goes to the other stream, if that is a file."""
    window, programs = pty.openpty()
    words = [sys.executable, "-c", SIGNALLED, "SIG_DFL", str(int(HUP))]
    done = subprocess.run(words, stdin=programs, stderr=programs, stdout=subprocess.PIPE, text=True, timeout=50)
    os.close(window)
    os.close(programs)
    assert (done.stdout.strip(), done.returncode) == ("asked", 129)


@pytest.mark.parametrize("reader", ["terminal", "pipe"])
def test_what_is_written_to_a_reader_who_has_gone_goes_nowhere(reader: str) -> None:
    window, programs = pty.openpty() if reader == "terminal" else os.pipe()
    with os.fdopen(programs, "w", buffering=1) as stream:
        output = TolerantOutput(stream)
        output.write("heard\n")
        assert os.read(window, 100).strip() == b"heard"
        os.close(window)
        for _ in range(3):
            output.write("not heard\n")
            output.flush()
        assert os.readlink(f"/proc/self/fd/{output.fileno()}") == os.devnull


def test_what_else_goes_wrong_with_output_is_not_kept_back() -> None:
    with open("/dev/full", "w", buffering=1) as stream:
        with pytest.raises(OSError, match="No space left"):
            TolerantOutput(stream).write("too much\n")
        redirect_to_null(stream.fileno())  # closing the stream writes the rest
