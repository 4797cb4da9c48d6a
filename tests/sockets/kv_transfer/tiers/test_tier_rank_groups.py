"""Tiers of two ranks whose model has several cache groups: each keeps its share of every group."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from baton.engine.core.layout import CacheKind, CacheLayout, GroupLayout, KVLayout, StateLayout, StatePart
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.engine.core.tiers import Restored, Tier
from baton.kv_transfer.errors import MalformedMessage, TransportError
from baton.kv_transfer.group.rpc import GroupRank, GroupSocket
from baton.kv_transfer.settings import TierSettings
from baton.kv_transfer.tiers.group import MoveBlocks, OpenTiers, TierHandler, follow_tiers
from baton.kv_transfer.tiers.store import TierStore
from baton.kv_transfer.tiers.tier_index import Move

from ....helpers.tier_memory import event_of, name, names

pytestmark = pytest.mark.timeout(60)

_names = itertools.count(1)
FULL = KVLayout(model="small", num_layers=2, num_kv_heads=2, head_dim=32, dtype="bfloat16")
STATES = StateLayout(model="small", num_layers=3, parts=(StatePart((4, 64), "float32"),))
CACHES = CacheLayout(
    (
        GroupLayout(kind=CacheKind.FULL, window=None, layers=(0, 1), blocks=FULL),
        GroupLayout(kind=CacheKind.STATE, window=None, layers=(2, 3, 4), blocks=STATES),
    )
)
SIZES = (24, 6)


class Memory:
    """The arenas of one of two ranks, and random content for them."""

    def __init__(self, rank: int) -> None:
        layouts = [group.blocks for group in CACHES.groups]
        heads = [layout.heads_of(rank, 2) for layout in layouts]
        shares = [layout.bytes_of(kept) for layout, kept in zip(layouts, heads, strict=True)]
        self.bytes = np.zeros(sum(count * share for count, share in zip(SIZES, shares, strict=True)), dtype=np.uint8)
        arenas, offset = [], 0
        self.blocks: list[np.ndarray] = []  # of all arenas, by number
        for count, layout, kept, share in zip(SIZES, layouts, heads, shares, strict=True):
            address = self.bytes.ctypes.data + offset
            arenas.append(ArenaRegion(address, count, "cpu", layout, kept.start, len(kept)))
            self.blocks += list(self.bytes[offset : offset + count * share].reshape(count, share))
            offset += count * share
        self.region = CacheRegion(CACHES, tuple(arenas))
        random = np.random.default_rng(rank)
        self.content = [random.integers(0, 256, len(block), dtype=np.uint8) for block in self.blocks]

    def fill(self) -> None:
        for block, content in zip(self.blocks, self.content, strict=True):
            block[:] = content

    def holds(self, blocks: Sequence[int]) -> bool:
        return all((self.blocks[block] == self.content[block]).all() for block in blocks)


def settings_of(folder: Path | None, host: int = 0) -> TierSettings:
    on_disk = {"disk_path": str(folder), "disk_bytes": 300_000} if folder else {}
    return TierSettings(host_bytes=host, **on_disk)


@contextlib.contextmanager
def two_ranks(
    folder: Path | None, host: int = 0, other_host: int | None = None
) -> Iterator[tuple[TierStore, list[Memory]]]:
    memories = [Memory(rank) for rank in range(2)]
    socket = GroupSocket(2, "127.0.0.1", None)
    member = follow_tiers(
        memories[1].region,
        GroupRank(1, 2, None),
        settings_of(folder, host if other_host is None else other_host),
        leader=socket.address,
        name=f"member-{next(_names)}",
        cpu_affinity="any",
    )
    try:
        store = TierStore(
            memories[0].region,
            settings_of(folder, host),
            name=f"leader-{next(_names)}",
            cpu_affinity="any",
            group_socket=socket,
        )
        try:
            yield store, memories
        finally:
            store.close()
    finally:
        member.close()
        socket.close()


KEPT, STATE = [0, 1, 2], 24 + 4  # blocks of the first group, and a slot of the second


def save(store: TierStore, memories: Sequence[Memory]) -> None:
    for memory in memories:
        memory.fill()
    store.store(names(KEPT), KEPT)
    event_of(store)
    store.store([name(2)], [STATE])
    event_of(store)


def load(store: TierStore, memories: Sequence[Memory]) -> int:
    for memory in memories:
        memory.bytes[:] = 0
    store.restore([*names(KEPT), name(2)], [*KEPT, STATE])
    event = event_of(store)
    assert isinstance(event, Restored)
    for memory in memories:
        assert memory.holds([*KEPT, STATE][: event.num_blocks])
    return event.num_blocks


@pytest.mark.parametrize("host", [0, 100_000])
def test_shares_of_all_groups_are_restored_and_found_again(tmp_path: Path, host: int) -> None:
    with two_ranks(tmp_path, host) as (store, memories):
        save(store, memories)
        assert store.tier_of(name(2), 1) is (Tier.HOST if host else Tier.DISK)
        assert store.tier_of(name(1), 1) is None, "a hash must be known only in groups that have stored it"
        assert load(store, memories) == 4
        assert sum(store.stats().blocks.values()) == 4
    assert len(list(tmp_path.glob("*/*.kv"))) == 4, "each rank and group must have a file"
    with two_ranks(tmp_path, host) as (store, memories):
        for memory in memories:
            memory.fill()
        assert store.find(names(KEPT)) == 3
        assert load(store, memories) == 4


def test_a_state_that_is_damaged_on_one_rank_is_lost_on_both(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as (store, memories):
        save(store, memories)
        (content,) = [memories[1].content[STATE].tobytes()]
    for path in tmp_path.glob("state-*/*.kv"):
        found = path.read_bytes()
        path.write_bytes(found.replace(content, content[:9] + bytes([content[9] ^ 1]) + content[10:]))
    with two_ranks(tmp_path) as (store, memories):
        for memory in memories:
            memory.fill()
        assert load(store, memories) == 3
        assert store.tier_of(name(2), 1) is None
        assert store.stats().failures == {"corrupt": 1}


def test_ranks_with_different_numbers_of_slots_do_not_start() -> None:
    with (
        pytest.raises(TransportError, match="give all the same kv_tiers"),
        two_ranks(None, host=100_000, other_host=60_000),
    ):
        pass


def test_a_move_from_one_group_to_another_is_refused() -> None:
    handler = TierHandler(Memory(1).region, settings_of(None, 100_000), "s", 1, 2)
    opened = list(handler.handle(OpenTiers("")))
    assert len(opened) == 2, "each group must have a report"
    with pytest.raises(MalformedMessage, match="from one cache group to another"):
        list(handler.handle(MoveBlocks([Move(name(1), Tier.POOL, STATE, Tier.HOST, 0)])))
    handler.close()
