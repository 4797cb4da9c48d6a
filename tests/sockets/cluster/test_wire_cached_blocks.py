"""Gateways know which blocks an engine has cached, whatever updates they missed."""

from __future__ import annotations

import pytest

from baton.cluster.contracts import DirectorySnapshot, EngineRecord
from baton.cluster.engine_client import ZmqEngineClient
from baton.cluster.engines.engine_socket import GatewayLost
from baton.cluster.engines.server import EngineServer
from baton.engine.core.block_log import BlockLog, GroupLog, HitRule, pack_names, unpack_names

from ...helpers.fakes import CountingEngine, ListedSource, make_request, serve_engine
from .wire_fixtures import KEY, tokens_of, until

pytestmark = pytest.mark.timeout(60)

HASHES = [bytes([index]) * 16 for index in (1, 2, 3)]


def cached_by(client: ZmqEngineClient, hashes: list[bytes]) -> int:
    """Return how many leading blocks of a prompt the engine has, as far as the gateway knows."""
    views = client.engines()
    return views[0].cached.count_prefix(unpack_names(pack_names(hashes))) if views else 0


async def test_gateways_know_what_an_engine_has_cached_also_those_that_come_later(
    client: ZmqEngineClient, source: ListedSource, engine: CountingEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    for block_hash in HASHES:
        engine.store(block_hash)
    served[0].wake()
    await until(lambda: cached_by(client, HASHES) == 3)
    engine.evict(HASHES[1])  # unpublished: the newcomer's snapshot and the other's updates must agree on its number
    later = ZmqEngineClient(source, KEY, "gateway-b")
    await later.start()
    try:
        await until(lambda: cached_by(later, HASHES) == 1 and cached_by(client, HASHES) == 1)
        engine.store(HASHES[1])
        served[0].wake()
        await until(lambda: cached_by(later, HASHES) == 3 and cached_by(client, HASHES) == 3)
        assert client.counters().block_gaps == later.counters().block_gaps == 0
    finally:
        await later.close()


async def test_news_of_blocks_that_a_gateway_missed_are_asked_for(
    client: ZmqEngineClient, engine: CountingEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    server, record = served
    engine.store(HASHES[0])
    server.wake()
    await until(lambda: cached_by(client, HASHES) == 1)
    server.socket.post(GatewayLost(), b"gateway-a")  # a message could not be sent: it hears nothing until it asks
    server.wake()
    await until(lambda: server.socket.is_empty)
    other = ZmqEngineClient(ListedSource(), KEY, "gateway-b")
    await other.start()
    other.apply(DirectorySnapshot(9, [record], []))
    try:
        await until(lambda: cached_by(other, HASHES) == 1)
        engine.store(HASHES[1])
        server.wake()
        await until(lambda: cached_by(other, HASHES) == 2)
        assert cached_by(client, HASHES) == 1
        assert len(await tokens_of(client.submit(record, make_request("a")))) == 5
        engine.store(HASHES[2])
        server.wake()
        await until(lambda: cached_by(client, HASHES) == 3)
        assert (client.counters().block_gaps, other.counters().block_gaps) == (1, 0)
    finally:
        await other.close()


async def test_a_lost_connection_forgets_what_was_cached(
    client: ZmqEngineClient, engine: CountingEngine, served: tuple[EngineServer, EngineRecord], source: ListedSource
) -> None:
    engine.store(HASHES[0])
    served[0].wake()
    await until(lambda: cached_by(client, HASHES) == 1)
    served[0].close()
    server, record = serve_engine(CountingEngine(), KEY, epoch=2)
    source.show(record)
    try:
        await until(lambda: [view.record.epoch for view in client.engines()] == [2])
        assert cached_by(client, HASHES) == 0
    finally:
        server.close()


class HybridEngine(CountingEngine):
    """An engine with a second cache group, which keeps a state at every block."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: set[bytes] = set()
        self._states = GroupLog(self.kept)
        blocks = GroupLog(self.cached.keys())
        for block_hash in HASHES:
            self.cached[block_hash] = 0
            blocks.stored(block_hash)
        self._both = BlockLog([blocks, self._states], [HitRule(), HitRule(checkpoint_blocks=1)])

    def block_log(self) -> BlockLog:
        return self._both

    def keep(self, block_hash: bytes) -> None:
        self.kept.add(block_hash)
        self._states.stored(block_hash)


async def test_gateways_know_how_long_a_hit_all_cache_groups_of_an_engine_allow(source: ListedSource) -> None:
    engine, names = HybridEngine(), unpack_names(pack_names(HASHES))
    server, record = serve_engine(engine, KEY)
    source.show(record)
    client = ZmqEngineClient(source, KEY, "gateway-c")
    await client.start()

    def has(num_blocks: int, num_found: int) -> bool:
        views = client.engines()
        return bool(views) and (views[0].cached.count_prefix(names), views[0].cached.find(names).pool) == (
            num_blocks,
            num_found,
        )

    try:
        await until(lambda: has(3, 0))
        engine.keep(HASHES[1])
        server.wake()
        await until(lambda: has(3, 2))
        assert client.counters().block_gaps == 0
    finally:
        await client.close()
        server.close()
