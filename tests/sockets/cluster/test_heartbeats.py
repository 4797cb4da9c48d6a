"""An engine whose machine or link is lost: nobody reports that, and no connection is closed. No Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest

from baton.cluster.engine_client import ZmqEngineClient
from baton.cluster.engines.server import EngineServer
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.cluster.gateway.serving.context import ServingContext
from baton.cluster.gateway.serving.sequence import ServedSequence
from baton.cluster.gateway.serving.timeline import Timeline
from baton.cluster.gateway.settings import GatewaySettings
from baton.engine.net.curve import ClusterKey

from ...helpers.fakes import CountingEngine, ListedSource, make_request, serve_engine
from ...helpers.silent_proxy import SilentProxy

pytestmark = pytest.mark.timeout(60)

KEY = ClusterKey.generate()
HEARTBEAT_TIMEOUT_S = 1.0  # shorter than the default, as tests wait for it
NOTICED_S = 15.0  # far longer than that: other tests may share the cores
LONG = 1_000_000  # tokens of an answer that does not end by itself


class Cut:
    """Engine 0 behind a proxy, engine 1 reachable, and what a gateway's sequences share, over real sockets."""

    def __init__(self, proxy: SilentProxy, engines: list[CountingEngine], client: ZmqEngineClient) -> None:
        settings = GatewaySettings(capacity_timeout_s=NOTICED_S, session_patience_s=0.0, local_prefill_max_tokens=64)
        self.proxy, self.engines, self.client = proxy, engines, client
        self.metrics = GatewayMetrics("m", client.engines)
        self.serving = ServingContext(client, settings, self.metrics)

    async def stream_at_the_first_engine(self) -> ServedSequence:
        """Begin a stream at engine 0: the request id decides between equal engines, so try ids until one goes there."""
        for number in range(100):
            sequence = ServedSequence(self.serving, make_request(f"r{number}", max_tokens=LONG), Timeline(0.0, 0.0))
            outputs = sequence.outputs()
            await anext(outputs)
            if self.engines[0].running:
                self.outputs = outputs
                return sequence
            await outputs.aclose()
        raise AssertionError("the first engine is never chosen")

    async def tokens(self, count: int) -> list[int]:
        """Return the next `count` tokens of that stream, or a few more that came together."""
        tokens: list[int] = []
        async with asyncio.timeout(NOTICED_S):
            while len(tokens) < count:
                tokens += (await anext(self.outputs)).token_ids
        return tokens

    def decisions(self) -> dict[str, float]:
        """Return the number of decisions, and the sum of their times."""
        lines = self.metrics.render().decode().splitlines()
        name = 'baton_failure_decision_seconds_{}{{failure="engine-gone"}} '
        return {
            part: float(line.removeprefix(name.format(part)))
            for part in ("count", "sum")
            for line in lines
            if line.startswith(name.format(part))
        }


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(NOTICED_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def engines() -> list[CountingEngine]:
    return [CountingEngine(), CountingEngine()]


@pytest.fixture
def servers(engines: list[CountingEngine]) -> Iterator[list[EngineServer]]:
    servers: list[EngineServer] = []
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
async def cut(engines: list[CountingEngine], servers: list[EngineServer]) -> AsyncIterator[Cut]:
    records = []
    for rank, engine in enumerate(engines):
        server, record = serve_engine(engine, KEY, rank=rank, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S)
        servers.append(server)
        records.append(record)
    with SilentProxy(records[0].address) as proxy:
        source = ListedSource()
        source.show(msgspec.structs.replace(records[0], address=proxy.address), records[1])
        client = ZmqEngineClient(source, KEY, "gateway-a", heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S)
        await client.start()
        await until(lambda: len(client.engines()) == 2)
        yield Cut(proxy, engines, client)
        await client.close()


async def test_a_stream_of_an_engine_that_falls_silent_goes_on_at_another_one(cut: Cut) -> None:
    await cut.stream_at_the_first_engine()
    before = await cut.tokens(10)
    cut.proxy.silence()
    silent_s = time.monotonic()
    after: list[int] = []
    while not cut.engines[1].running:
        after += await cut.tokens(1)
    resubmitted_s = time.monotonic()
    after += await cut.tokens(10)
    assert before + after == list(range(before[0], before[0] + len(before + after))), "a gap, or a repetition"
    assert resubmitted_s - silent_s < NOTICED_S
    decisions = cut.decisions()
    assert decisions["count"] == 1
    assert HEARTBEAT_TIMEOUT_S / 2 < decisions["sum"] <= resubmitted_s - silent_s + 1.0
    await cut.outputs.aclose()


async def test_a_silent_engine_is_not_chosen(cut: Cut) -> None:
    cut.proxy.silence()
    await until(lambda: [view.record.rank for view in cut.client.engines()] == [1])
    for number in range(20):
        outputs = ServedSequence(
            cut.serving, make_request(f"later-{number}", max_tokens=3), Timeline(0.0, 0.0)
        ).outputs()
        assert [token async for output in outputs for token in output.token_ids] == [1, 2, 3]
    assert not cut.decisions(), "somebody waited for an engine that was known to be silent"


async def test_an_engine_that_is_heard_again_ends_its_old_attempts_and_takes_new_ones(cut: Cut) -> None:
    await cut.stream_at_the_first_engine()
    (lost,) = cut.engines[0].running
    cut.proxy.silence()
    await until(lambda: len(cut.client.engines()) == 1)
    while lost not in cut.engines[1].running:  # it moves after the tokens that had arrived
        await cut.tokens(1)
    cut.proxy.speak()
    await until(lambda: len(cut.client.engines()) == 2)
    await until(lambda: not cut.engines[0].running)
    assert lost in cut.engines[0].aborted
    assert lost in cut.engines[1].running
    await cut.outputs.aclose()
    await cut.stream_at_the_first_engine()
    assert len(await cut.tokens(10)) >= 10
    await cut.outputs.aclose()
    await until(lambda: not any(engine.running for engine in cut.engines))


async def test_the_engine_ends_what_it_has_for_a_gateway_that_falls_silent(cut: Cut) -> None:
    await cut.stream_at_the_first_engine()
    cut.proxy.silence()
    await until(lambda: not cut.engines[0].running)
    await cut.outputs.aclose()


@pytest.mark.slow
async def test_an_engine_that_only_computes_for_long_is_not_taken_for_silent(cut: Cut) -> None:
    """libzmq's thread answers pings, whatever the engine does."""
    await cut.stream_at_the_first_engine()
    cut.engines[0].hang.clear()
    await asyncio.sleep(4 * HEARTBEAT_TIMEOUT_S)
    cut.engines[0].hang.set()
    assert len(await cut.tokens(10)) >= 10
    assert len(cut.client.engines()) == 2
    assert not cut.decisions()
    await cut.outputs.aclose()
