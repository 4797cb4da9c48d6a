"""A disk that is full below Ray's files, and the addresses that `baton serve` prints, as its console tells them."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..helpers.free_ports import free_port
from ..helpers.served import BATON, Server, baton_serve, config_file, eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount"),
]

DISK_BYTES = 200 * 2**20
FREE_BYTES = 4 * 2**20  # less than the 5 % that Ray wants


@pytest.fixture(scope="module")
def ray_disk() -> Iterator[Path]:
    """Mount a disk for Ray's files. Its path is short: sockets are below it."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder], check=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_TMPDIR", str(folder))
        yield folder
    subprocess.run(["umount", "-l", folder], check=True)
    folder.rmdir()


@pytest.fixture(scope="module")
def server(ray_disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    file = config_file(tmp_path_factory.mktemp("full"), name="full", port=port)
    with baton_serve(file, port) as server:
        yield server


def fill(disk: Path) -> None:
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with (disk / "filling").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - FREE_BYTES)


def clear(disk: Path) -> None:
    (disk / "filling").unlink()


def test_each_engine_is_recorded_at_the_address_that_is_printed(server: Server) -> None:
    (line,) = [line for line in server.output().splitlines() if line.startswith("baton drain RANK")]
    words = ["profile", "--seconds", "1", *line.split()[3:]]
    done = subprocess.run([BATON, *words], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    _, *told = done.stdout.splitlines()
    assert sorted(each.split("-")[0] for each in told) == ["decode", "prefill"]
    for each in told:
        file = Path(each.partition(" MB in ")[2].partition(" on ")[0])
        with gzip.open(file, "rt") as trace:
            assert "traceEvents" in json.load(trace)
        file.unlink()


def test_the_command_that_is_printed_drains_a_group(server: Server) -> None:
    """Other clusters may run on this machine: `auto` would not know which."""
    (line,) = [line for line in server.output().splitlines() if line.startswith("baton drain RANK")]
    rank = server.rank_of("decode")["rank"]
    words = line.replace("RANK", str(rank)).split()[1:]
    done = subprocess.run([BATON, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"rank {rank}: it drains" in done.stdout
    assert f"baton status --url {server.url}" in server.output()


def test_a_disk_that_fills_up_while_it_serves_is_named_once(server: Server, ray_disk: Path) -> None:
    told = f"warning: the disk of {ray_disk}/ray is 9"
    assert told not in server.output()
    fill(ray_disk)
    eventually(lambda: told in server.output(), 60, server.output)
    clear(ray_disk)
    check = subprocess.run([BATON, "check", "configs/serve/demo.yaml"], capture_output=True, text=True, timeout=60)
    assert "the disk of" not in check.stderr
    fill(ray_disk)
    eventually(lambda: server.output().count(told) == 2, 60, server.output)
    check = subprocess.run([BATON, "check", "configs/serve/demo.yaml"], capture_output=True, text=True, timeout=60)
    assert f"this machine: the disk of {ray_disk}/ray is 9" in check.stderr
    assert check.returncode == 0
    clear(ray_disk)


def test_a_disk_that_is_full_is_named_before_the_start(ray_disk: Path) -> None:
    fill(ray_disk)
    done = subprocess.run(
        [BATON, "serve", "configs/demo/model", "--address", f"127.0.0.1:{free_port()}", "--port", str(free_port())],
        capture_output=True,
        text=True,
        timeout=60,
    )
    clear(ray_disk)
    assert done.returncode == 1, "there is no such cluster"
    assert done.stdout.index(f"warning: the disk of {ray_disk}/ray is 9") > 0
