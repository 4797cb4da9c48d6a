"""Every rank maps the memory of every other, or all ranks get the reason. test_p2p.py tests the kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from baton.kernels.p2p import PeerAccessError
from baton.kernels.p2p import peer_memory as memory_module
from baton.kernels.p2p.cuda_ipc import DriverError
from baton.kernels.p2p.peer_memory import EMPTY, total_bytes


class FakeMemory:
    """A fake of `DeviceMemory` in this process. `refused` names the call that fails, and the rank whose call it is."""

    refused: tuple[str, str] | None = None
    loses_writes = False
    by_handle: dict[bytes, bytearray] = {}
    num_freed = 0

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.address = id(data)

    @classmethod
    def allocate(cls, num_bytes: int) -> FakeMemory:
        cls._refuse("allocate")
        return cls(bytearray(num_bytes))

    @classmethod
    def open(cls, handle: bytes) -> FakeMemory:
        cls._refuse("open")
        return cls(bytearray(cls.by_handle[handle]) if cls.loses_writes else cls.by_handle[handle])

    @classmethod
    def _refuse(cls, call: str) -> None:
        if cls.refused == (call, threading.current_thread().name):
            raise DriverError(f"{call} gave CUDA_ERROR")

    def handle(self) -> bytes:
        handle = self.address.to_bytes(8, "little")
        self.by_handle[handle] = self.data
        return handle

    def fill(self, value: int, count: int) -> None:
        self.data[: 2 * count] = value.to_bytes(2, "little", signed=True) * count

    def write(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data

    def read(self, offset: int, num_bytes: int) -> bytes:
        return bytes(self.data[offset : offset + num_bytes])

    def free(self) -> None:
        type(self).num_freed += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeMemory]:
    kind = type("FakeMemoryOfOneTest", (FakeMemory,), {"by_handle": {}})
    monkeypatch.setattr(memory_module, "DeviceMemory", kind)
    return kind


def map_in_threads(size: int, machine_of: Callable[[int], str] | None = None) -> list[Any]:
    """Map memory in a thread per rank. Return each rank's mapping, or the error that it raised."""
    barrier, said, outcomes = threading.Barrier(size, timeout=10), [""] * size, [None] * size

    def be(rank: int) -> None:
        def exchange(words: str) -> list[str]:
            said[rank] = words
            barrier.wait()
            told = list(said)
            barrier.wait()
            return told if machine_of is None or "-" not in told[0][1:] else [f"+{machine_of(r)}" for r in range(size)]

        mapping = memory_module.PeerMapping(rank, size, 64)
        try:
            mapping.make(exchange)
        except PeerAccessError as error:
            mapping.free()
            mapping = error
        outcomes[rank] = mapping

    threads = [threading.Thread(target=be, args=(rank,), name=str(rank)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_every_rank_reaches_the_memory_of_every_other(fake: type[FakeMemory]) -> None:
    mappings = map_in_threads(3)
    assert mappings[0].addresses == mappings[1].addresses == mappings[2].addresses
    empty = EMPTY.to_bytes(2, "little", signed=True)
    assert all(data[: total_bytes(64)] == empty * (total_bytes(64) // 2) for data in fake.by_handle.values())
    for mapping in mappings:
        mapping.free()
        mapping.free()
    assert fake.num_freed == 9


@pytest.mark.parametrize("call", ["allocate", "open"])
def test_all_ranks_get_the_error_of_a_driver(fake: type[FakeMemory], call: str) -> None:
    fake.refused = (call, "1")
    reasons = {str(outcome) for outcome in map_in_threads(3)}
    assert reasons == {f"rank 1: {call} gave CUDA_ERROR"}
    assert fake.num_freed == (2 if call == "allocate" else 7)


def test_memory_that_loses_writes_of_peers_is_not_used(fake: type[FakeMemory]) -> None:
    fake.loses_writes = True
    reasons = {str(outcome) for outcome in map_in_threads(2)}
    assert reasons == {"rank 0: the test value that rank 1 wrote to peer memory did not arrive"}


def test_ranks_on_several_machines_are_out_of_reach(fake: type[FakeMemory]) -> None:
    outcomes = map_in_threads(2, machine_of=lambda rank: f"machine {rank}")
    assert {str(outcome) for outcome in outcomes} == {"the ranks are on several machines"}
    assert not fake.by_handle
