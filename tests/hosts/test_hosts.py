"""Hosts made of namespaces are separate, reach each other over the network, and leave nothing behind."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cluster.cli.processes import Process

from .. import ROOT
from ..helpers.served import eventually
from .hosts import BRIDGE, Hosts, left_over

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CRASHES = """
import time
from tests.hosts.hosts import Hosts
hosts = Hosts("a").__enter__()
print("there", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def hosts(machine_with_hosts: None) -> Iterator[Hosts]:
    with Hosts("a", "b") as hosts:
        yield hosts


def answered(hosts: Hosts, what: str = "b") -> bool:
    """Return whether host a reaches the other one."""
    code = (
        "import socket, sys; s = socket.socket(); s.settimeout(1);"
        f"sys.exit(0 if s.connect_ex(({hosts[what].ip!r}, 9)) == 111 else 1)"  # refused: the host answers
    )
    return hosts["a"].run([sys.executable, "-c", code], timeout_s=10, check=False).returncode == 0


def test_hosts_reach_each_other_and_share_neither_processes_nor_files(hosts: Hosts) -> None:
    assert answered(hosts)
    hosts["a"].run(["sh", "-c", "echo mine > /tmp/file; echo mine > /dev/shm/file"], timeout_s=10)
    seen = hosts["b"].run(["sh", "-c", "ls /tmp /dev/shm; hostname; ps -e | wc -l"], timeout_s=10).stdout
    assert "file" not in seen
    assert "b\n" in seen
    assert int(seen.split()[-1]) < 10, "it sees processes of others"
    assert not Path("/dev/shm/file").exists()


def test_a_cable_that_is_out_and_in_again(hosts: Hosts) -> None:
    hosts["b"].set_link("down")
    assert not answered(hosts)
    hosts["b"].set_link("up")
    eventually(lambda: answered(hosts), 20.0, "it is not reached")  # the first packets may be lost


def test_another_machine_takes_the_place_of_one_and_the_bridge_keeps_its_address(hosts: Hosts) -> None:
    address = Path(f"/sys/class/net/{BRIDGE}/address")
    before, old_ip = address.read_text(), hosts["b"].ip
    assert hosts.replace("b").ip != old_ip
    eventually(lambda: answered(hosts), 20.0, "it is not reached")
    assert address.read_text() == before


def test_a_process_that_stays_is_found_by_its_title_and_ends_with_its_host(hosts: Hosts) -> None:
    process = hosts["a"].start(["sleep", "1234"], log="sleep.log")
    seen: list[Process] = []  # during exec a process has no title

    def is_seen() -> bool:
        seen[:] = hosts["a"].find("sleep 1234")
        return len(seen) == 1

    eventually(is_seen, 20.0, "it did not start")
    (found,) = seen
    assert hosts["b"].find("sleep 1234") == []
    hosts["a"].close()
    assert process.wait(timeout=10) != 0
    assert not found.alive()


def test_a_run_that_was_killed_is_cleared_by_the_next_one(machine_with_hosts: None) -> None:
    with subprocess.Popen([sys.executable, "-c", CRASHES], cwd=ROOT, stdout=subprocess.PIPE, text=True) as crashing:
        assert crashing.stdout is not None
        assert crashing.stdout.readline() == "there\n"
        crashing.kill()
    assert any(re.match(r"process \d+", what) for what in left_over())
    with Hosts("a"):
        pass
    assert left_over() == []
