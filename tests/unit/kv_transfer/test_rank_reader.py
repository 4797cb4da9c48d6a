"""One rank's connections to the ranks of a holder."""

from __future__ import annotations

import random

import pytest

from baton.engine.core.layout import CacheKind, CacheLayout, GroupLayout, KVLayout
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.kv_transfer.errors import MalformedMessage, TransportError
from baton.kv_transfer.group.rank_reader import ArenaPlace, RankMemory, RankReader, group_metadata

from ...helpers.fake_transport import FakeFabric, FakeTransport
from ...helpers.virtual_clock import VirtualClock

LAYOUT = KVLayout(model="m", num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
NUM_BLOCKS = 4


def region(num_groups: int) -> CacheRegion:
    groups = [
        GroupLayout(kind=CacheKind.FULL, window=None, layers=(number,), blocks=LAYOUT) for number in range(num_groups)
    ]
    size = NUM_BLOCKS * LAYOUT.block_bytes
    arenas = [ArenaRegion(number * size, NUM_BLOCKS, "cpu", LAYOUT, 0, 1) for number in range(num_groups)]
    return CacheRegion(CacheLayout(tuple(groups)), tuple(arenas))


class Reader:
    def __init__(self, num_groups: int) -> None:
        own = region(num_groups)
        fabric = FakeFabric(VirtualClock(), random.Random(0))
        self.transport: FakeTransport = fabric.attach("reader", bytearray(own.num_bytes))
        self.holder = RankReader(0, own, fabric.attach("holder", bytearray(own.num_bytes))).memory
        self.reader = RankReader(0, own, self.transport)


def test_a_holder_that_describes_other_cache_groups_leaves_no_connection_behind() -> None:
    """A handshake is repeated every few seconds."""
    end = Reader(2)
    memory = RankMemory(0, 1, end.holder.transport, end.holder.arenas[:1])
    with pytest.raises(TransportError, match="describes 1 cache groups, there are 2"):
        end.reader.add_peer(1, group_metadata([memory]))
    assert end.transport.num_peers == 0
    end.reader.add_peer(1, group_metadata([end.holder]))
    assert end.transport.num_peers == 1


def test_a_holder_that_describes_more_blocks_than_any_engine_has_is_refused() -> None:
    end = Reader(2)
    memory = RankMemory(0, 1, end.holder.transport, (ArenaPlace(0, 2**62), ArenaPlace(0, 2**62)))
    with pytest.raises(MalformedMessage):
        end.reader.add_peer(1, group_metadata([memory]))
