"""Transfers between a tier's disk and memory: the memory is not used again before nothing can write to it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import cast

import pytest

from baton.engine.core.tiers import Tier
from baton.kv_transfer.host_memory import HostMemory
from baton.kv_transfer.tiers import worker
from baton.kv_transfer.tiers.disk_files import DiskFiles
from baton.kv_transfer.tiers.tier_index import Loss, Move
from baton.kv_transfer.tiers.worker import Disk
from baton.kv_transfer.transports import Ranges, ReadHandle, ReadState


@dataclasses.dataclass
class Transfers:
    """A `FileTransport` whose transfers are done at once, and are released after `num_refusals`."""

    num_refusals: float
    num_released: int = 0

    def read(self, ranges: Ranges) -> ReadHandle:
        return 1

    write = read

    def poll(self, handle: ReadHandle) -> ReadState:
        return ReadState.DONE

    def release(self, handle: ReadHandle) -> bool:
        self.num_refusals -= 1
        self.num_released += self.num_refusals < 0
        return self.num_refusals < 0

    def close(self) -> None: ...


def disk_over(transfers: Transfers) -> Disk:
    files = SimpleNamespace(slot_bytes=16, path="disk", fits=lambda slot, view: True, note=lambda *noted: None)
    return Disk(cast(DiskFiles, files), transfers, cast(HostMemory, SimpleNamespace(view=bytes)))


MOVES = [Move(b"hash", Tier.DISK, 0, Tier.HOST, 0)]


def test_a_transfer_has_ended_when_it_is_released() -> None:
    transfers = Transfers(num_refusals=3)
    assert disk_over(transfers).read(MOVES, [0]) == [None]
    assert transfers.num_released == 1


@pytest.mark.parametrize("writes", [True, False])
def test_a_transfer_that_is_not_released_turns_the_disk_off(writes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "TRANSFER_TIMEOUT_S", 0.0)
    disk = disk_over(Transfers(num_refusals=float("inf")))
    lost = disk.write(MOVES, [0]) if writes else disk.read(MOVES, [0])
    assert lost == [Loss.DISK_WRITE if writes else Loss.DISK_READ]
    assert disk.failed
