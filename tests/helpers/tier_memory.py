"""A pool of blocks whose content tells their number, and a `TierStore` over it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.engine.core.layout import KVLayout
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.engine.core.tiers import Restored, TierEvent
from baton.kv_transfer.settings import TierSettings
from baton.kv_transfer.tiers.store import TierStore

LAYOUT = KVLayout(model="small", num_layers=2, num_kv_heads=2, head_dim=32, dtype="bfloat16")  # 8 KB a block
BLOCK = LAYOUT.block_bytes
PATIENCE_S = 60.0
_names = itertools.count(1)


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def names(numbers: Sequence[int]) -> list[bytes]:
    return [name(number) for number in numbers]


class Pool:
    """The blocks of one rank of `size`."""

    def __init__(self, num_blocks: int = 64, layout: KVLayout = LAYOUT, rank: int = 0, size: int = 1) -> None:
        self.layout = layout
        self.heads = layout.heads_of(rank, size)
        self.blocks = np.zeros((num_blocks, len(self.heads) * layout.head_bytes), dtype=np.uint8)

    @property
    def region(self) -> CacheRegion:
        heads = self.heads
        address = self.blocks.ctypes.data
        return CacheRegion.of(ArenaRegion(address, len(self.blocks), "cpu", self.layout, heads.start, len(heads)))

    def content(self, number: int) -> np.ndarray:
        """Return the content of block `number`, for this rank's heads."""
        whole = np.random.default_rng(number).integers(0, 256, self.layout.block_bytes, dtype=np.uint8)
        size = self.layout.head_bytes
        return whole[self.heads.start * size : self.heads.stop * size]

    def fill(self, numbers: Sequence[int]) -> None:
        """Fill block i with the content for the i-th number."""
        for block, number in enumerate(numbers):
            self.blocks[block] = self.content(number)

    def holds(self, numbers: Sequence[int]) -> list[bool]:
        return [bool((self.blocks[block] == self.content(number)).all()) for block, number in enumerate(numbers)]


def event_of(store: TierStore) -> TierEvent:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if events := store.poll():
            assert len(events) == 1
            return events[0]
        time.sleep(1e-3)
    raise TimeoutError("the tiers did not answer")


def save(store: TierStore, pool: Pool, numbers: Sequence[int]) -> None:
    pool.fill(numbers)
    copy_id = store.store(names(numbers), range(len(numbers)))
    assert event_of(store).copy_id == copy_id


def load(store: TierStore, pool: Pool, numbers: Sequence[int]) -> int:
    """Load these blocks, check the content of those that came, and return their number."""
    pool.blocks[:] = 0
    found = store.find(names(numbers))
    copy_id = store.restore(names(numbers)[:found], range(found))
    event = event_of(store)
    assert isinstance(event, Restored)
    assert event.copy_id == copy_id
    assert sum(read.num_blocks for read in event.reads) == found
    assert all(read.seconds > 0 for read in event.reads)
    assert pool.holds(numbers[: event.num_blocks]) == [True] * event.num_blocks
    return event.num_blocks


@contextlib.contextmanager
def tiers(
    pool: Pool, *, host: int = 0, disk: int = 0, folder: Path | None = None, **settings: Any
) -> Iterator[TierStore]:
    """Open a store with so many slots in host memory and on a disk."""
    size = pool.layout.block_bytes
    on_disk = {"disk_path": str(folder), "disk_bytes": disk * size} if disk else {}
    store = TierStore(
        pool.region,
        TierSettings(host_bytes=host * size, **on_disk, **settings),
        name=f"tiers-{next(_names)}",
        cpu_affinity="any",
    )
    try:
        yield store
    finally:
        store.close()
