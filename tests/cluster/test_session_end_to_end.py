"""Signals to `baton serve` and Ray's processes: from a closed terminal, or a service manager.

Ray's library installs signal handlers of its own.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from baton.cluster.cli.processes import Process, descendants, kill, wait_until_gone

from ..helpers.free_ports import free_port
from ..helpers.served import BATON, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

MODEL = Path(__file__).parents[2] / "configs/demo/model"
START_S = 120.0
END_S = 45.0  # Ray's client would by itself wait a minute for a control process that is gone, and then abort

# The tests may run with ignored signals (nohup), which a started program would inherit.
AS_BY_A_SHELL = """
import fcntl, os, signal, sys, termios
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextlib.contextmanager
def serving(output: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a session leader whose output is this terminal or file, and end all of its processes afterwards."""
    serve = [BATON, "serve", str(MODEL), "--load-format", "dummy", "--port", str(free_port())]
    words = [sys.executable, "-c", AS_BY_A_SHELL, *serve]
    process = subprocess.Popen(words, stdin=output, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        left = descendants(process.pid)
        process.kill()
        process.wait()
        kill(left)


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """Open a terminal: the window's side, and the programs' side."""
    window, programs = pty.openpty()
    try:
        yield window, programs
    finally:
        os.close(programs)
        with contextlib.suppress(OSError):  # a test has closed it
            os.close(window)


def _ended(process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    return False


def read_until(window: int, words: bytes) -> None:
    shown = b""
    deadline_s = time.monotonic() + START_S
    while words not in shown:
        assert time.monotonic() < deadline_s, shown.decode()
        if select.select([window], [], [], 1.0)[0]:
            shown += os.read(window, 4096)


def read_to_the_end(window: int) -> None:
    """Read a terminal to its end: otherwise its programs would block."""
    with contextlib.suppress(OSError):
        while os.read(window, 4096):
            pass


def hears(process: Process, number: signal.Signals) -> bool:
    """Return whether the process would react to the signal now."""
    status = dict(re.findall(r"^(Sig(?:Blk|Ign)):\s*(\w+)$", Path(f"/proc/{process.pid}/status").read_text(), re.M))
    return not (int(status["SigBlk"], 16) | int(status["SigIgn"], 16)) >> (number - 1) & 1


RAY_COMES_AND_GOES = """
import ctypes, inspect, signal
from baton.cluster.cli.ray_cluster import connect, leave
from baton.cluster.cli.stop_signals import StopSignals
def handler():
    action = (ctypes.c_ulong * 32)()
    ctypes.CDLL(None).sigaction(signal.SIGTERM, None, action)
    return action[0]
stop = StopSignals(lambda: None)
stop.listen()
python = handler()
connect(None, include_dashboard=False, num_cpus=1, object_store_memory=100 * 2**20)
with_ray = handler()
leave()
from ray._private import node, worker
assert "ray._private.utils.set_sigterm_handler(sigterm_handler)" in inspect.getsource(worker.init)
assert worker._global_node is None and callable(node.Node.dead_processes)
print([with_ray == python, handler() == python, signal.getsignal(signal.SIGTERM) == stop._on_signal])
"""


def test_sigterm_is_ours_while_ray_is_there_and_when_it_has_gone() -> None:
    """The handler uses a private name of Ray's; if it vanished, nobody would notice otherwise."""
    done = subprocess.run([sys.executable, "-c", RAY_COMES_AND_GOES], capture_output=True, text=True, timeout=110)
    assert done.stdout.strip().splitlines()[-1:] == ["[True, True, True]"], done.stderr


def test_ctrl_c_while_ray_starts_leaves_nothing_behind() -> None:
    with terminal() as (window, programs), serving(programs) as process:
        read_until(window, b"starting Ray cluster")
        eventually(lambda: bool(descendants(process.pid)), START_S, "Ray's first process does not begin")
        started = descendants(process.pid)
        os.write(window, termios.tcgetattr(programs)[6][termios.VINTR])
        threading.Thread(target=read_to_the_end, args=(window,), daemon=True).start()
        assert process.wait(END_S) == 128 + signal.SIGINT
        assert wait_until_gone(started, 0.0) == []


def test_weights_that_do_not_fit_are_told_before_anything_is_deployed(tmp_path: Path) -> None:
    """Their memory is checked while Ray starts."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors")
    words = [BATON, "serve", str(model), "--port", str(free_port())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 2
    assert "1 missing: model.norm.weight" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] == "Stopped: every process has ended."
    assert "gateway" not in done.stdout


def its_terminal_closes(_: Path) -> None:
    """Hang up the terminal: only `baton serve` gets the signal, and it must end its child processes."""
    with terminal() as (window, programs), serving(programs) as process:
        read_until(window, b"starting gateway")
        started = descendants(process.pid)
        assert any("gcs_server" in Path(f"/proc/{each.pid}/cmdline").read_text() for each in started)
        assert [each for each in started if each.alive() and hears(each, signal.SIGHUP)] == []
        os.close(window)
        assert process.wait(END_S) == 128 + signal.SIGHUP
        assert wait_until_gone(started, 0.0) == []


def all_processes_are_told_to_end_at_once(folder: Path) -> None:
    """Signal all processes, as systemd does (`KillMode=control-group`): Ray's may end first."""
    log = folder / "log"
    with log.open("w") as output, serving(output.fileno()) as process:
        eventually(lambda: "ok Ray Serve" in log.read_text() or _ended(process, log), START_S, log.read_text)
        started = descendants(process.pid)
        for each in [process, *started]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGTERM)
        assert process.wait(END_S) == 0, log.read_text()
        assert "Stopped: every process has ended." in log.read_text()
        assert "Traceback" not in log.read_text()
        assert "SIGTERM" not in log.read_text()  # from Ray's library, which would abort the process 3 s later
        assert wait_until_gone(started, 0.0) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", [its_terminal_closes, all_processes_are_told_to_end_at_once])
def test_serve_ends_in_order_and_with_its_own_code_when(when: Callable[[Path], None], tmp_path: Path) -> None:
    when(tmp_path)
