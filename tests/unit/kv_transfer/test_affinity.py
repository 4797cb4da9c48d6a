"""The choice of the cores that the transfer thread runs on."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.kv_transfer.affinity import cpus_of_pci, parse_cpus, pin_thread

ALLOWED = os.sched_getaffinity(0)


def in_a_thread(call: Callable[[], object]) -> set[int]:
    """The CPUs on which a thread may run after the call."""
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: (call(), found.append(os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    return found[0]


def test_a_named_cpu_is_where_the_thread_runs_and_no_other_thread_is_moved() -> None:
    cpu = max(ALLOWED)
    assert in_a_thread(lambda: pin_thread(str(cpu), "cpu")) == {cpu}
    assert os.sched_getaffinity(0) == ALLOWED


@pytest.mark.parametrize("affinity", ["any", "device"])
def test_memory_of_the_cpu_moves_no_thread(affinity: str) -> None:
    assert in_a_thread(lambda: pin_thread(affinity, "cpu")) == ALLOWED


def test_cpus_that_are_refused_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="baton.kv_transfer.affinity"):
        assert in_a_thread(lambda: pin_thread("8191", "cpu")) == ALLOWED
    (record,) = caplog.records
    assert record.getMessage() == "the transfer thread stays on all CPUs: [8191] are refused (Invalid argument)"


def test_the_cpus_of_a_gpus_node_are_read_from_sys(tmp_path: Path) -> None:
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    node = tmp_path / "devices/system/node/node1"
    device.mkdir(parents=True)
    node.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (node / "cpulist").write_text("4-6,12\n")
    assert cpus_of_pci("0000:1b:00.0", tmp_path) == {4, 5, 6, 12}
    (device / "numa_node").write_text("-1\n")
    assert cpus_of_pci("0000:1b:00.0", tmp_path) is None
    assert cpus_of_pci("0000:99:00.0", tmp_path) is None


@pytest.mark.parametrize(("text", "cpus"), [("0", {0}), ("0-2", {0, 1, 2}), ("1,3-4", {1, 3, 4})])
def test_sets_of_cpus_read_as_linux_writes_them(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["", "one", "2-1", "1,2-1", "-1", "1,", "8192", "0-99999999999999"])
def test_text_that_names_no_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cpus(text)
