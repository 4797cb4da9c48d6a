"""Draining engines: gateways stop choosing them, running requests end, and the rest is returned. Without Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from baton.cluster.contracts import DirectorySnapshot, EnginePulse, EngineRecord, EngineView, Role
from baton.cluster.engine_client import ZmqEngineClient
from baton.cluster.engines.server import EngineServer
from baton.cluster.gateway.routing.rates import CostRates, LearntRates
from baton.cluster.gateway.routing.router import Path, Router
from baton.cluster.membership import draining
from baton.cluster.membership.draining import drain
from baton.cluster.simulation.virtual_engine import make_record
from baton.engine.core.messages import EngineRequest, ErrorKind
from baton.engine.core.sampling import SamplingParams
from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.protocol.stats import TransferStats

from ...helpers.fakes import STEP_S, CountingEngine, ListedSource, make_request, serve_engine

pytestmark = pytest.mark.timeout(60)

KEY = ClusterKey.generate()


class Group:
    """An engine server as `WorkerGroup` shows it."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server

    async def pulses(self) -> list[EnginePulse]:
        return [self._server.pulse()]

    async def return_requests(self) -> None:
        self._server.return_requests()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "SETTLE_S", 0.01)
    monkeypatch.setattr(draining, "POLL_S", 0.01)


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
async def gateway() -> AsyncIterator[tuple[ZmqEngineClient, ListedSource]]:
    source = ListedSource()
    client = ZmqEngineClient(source, KEY, "gateway-a")
    await client.start()
    yield client, source
    await client.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.005)


async def connect(gateway: tuple[ZmqEngineClient, ListedSource], record: EngineRecord) -> ZmqEngineClient:
    client, source = gateway
    source.show(record)
    await until(lambda: len(client.engines()) == 1)
    return client


class Forgetful:
    """Engines that lose two pulses, and the answer to `return_requests`, as a broken link would."""

    def __init__(self, num_requests: int) -> None:
        self.num_requests = num_requests
        self.num_asked = 0
        self.has_returned_requests = False

    async def pulses(self) -> list[EnginePulse]:
        self.num_asked += 1
        if self.num_asked in (1, 3):
            await asyncio.Event().wait()
        return [EnginePulse(0.0, self.num_requests, 0, 0)]

    async def return_requests(self) -> None:
        self.has_returned_requests, self.num_requests = True, 0
        await asyncio.Event().wait()


@pytest.mark.parametrize("num_requests", [0, 3])
async def test_an_answer_that_is_lost_with_a_link_holds_no_drain_up(
    num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "ANSWER_S", 0.01)
    monkeypatch.setattr(draining, "QUIET_S", 0.03)
    engines = Forgetful(num_requests)
    async with asyncio.timeout(20.0):
        await drain(engines, 0.2)
    assert engines.has_returned_requests == (num_requests > 0)


async def test_a_drain_waits_for_what_runs_to_its_last_token(
    engine: CountingEngine, gateway: tuple[ZmqEngineClient, ListedSource]
) -> None:
    server, record = serve_engine(engine, KEY)
    client = await connect(gateway, record)
    engine.hold.clear()
    stream = client.submit(record, make_request("a", max_tokens=40))
    await until(lambda: server.pulse().num_requests == 1)
    leaving = asyncio.create_task(drain(Group(server), 20.0))
    await asyncio.sleep(0.1)
    assert not leaving.done()
    late = client.submit(record, make_request("b", max_tokens=2))
    await until(lambda: server.pulse().num_requests == 2)
    engine.hold.set()
    assert (await leaving).handed_over == 0
    for each, length in ((stream, 40), (late, 2)):
        assert [token async for output in each for token in output.token_ids] == list(range(1, length + 1))
    server.close()


async def test_what_is_left_at_the_deadline_is_handed_back_and_nothing_more_is_taken(
    engine: CountingEngine, gateway: tuple[ZmqEngineClient, ListedSource]
) -> None:
    server, record = serve_engine(engine, KEY)
    client = await connect(gateway, record)
    engine.hold.clear()
    streams = [client.submit(record, make_request(name)) for name in "ab"]
    await until(lambda: server.pulse().num_requests == 2)
    drained = await drain(Group(server), 0.05)
    assert drained.handed_over == 2
    assert drained.seconds >= 0.05
    last_words = [await anext(stream) for stream in streams]
    assert [output.error.kind for output in last_words if output.error] == [ErrorKind.LEAVING] * 2
    assert sorted(engine.aborted) == ["a", "b"]
    late = await anext(client.submit(record, make_request("c")))
    assert late.error is not None
    assert late.error.kind is ErrorKind.LEAVING
    server.close()


@pytest.mark.parametrize("left", ["leases_held", "receives_active"])
async def test_blocks_on_their_way_are_waited_for(
    engine: CountingEngine, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "QUIET_S", 0.05)
    transfers = TransferStats(**{left: 1})
    server, _ = serve_engine(engine, KEY, transfers=lambda: transfers)
    await until(lambda: getattr(server.pulse(), left) == 1)
    leaving = asyncio.create_task(drain(Group(server), 20.0))
    await asyncio.sleep(0.5)  # long enough for a drain that would not wait
    assert not leaving.done()
    transfers = TransferStats()
    server.wake()
    await leaving
    server.close()


async def test_an_engine_that_has_nothing_leaves_at_once(engine: CountingEngine) -> None:
    server, _ = serve_engine(engine, KEY)
    drained = await drain(Group(server), 20.0)
    assert drained.handed_over == 0
    assert drained.seconds < 10.0
    server.close()


async def test_a_gateway_hears_of_a_drain_without_losing_its_connection(
    engine: CountingEngine, gateway: tuple[ZmqEngineClient, ListedSource]
) -> None:
    server, record = serve_engine(engine, KEY)
    client = await connect(gateway, record)
    engine.hold.clear()
    stream = client.submit(record, make_request("a"))
    gateway[1].show(msgspec.structs.replace(record, draining=True))
    await until(lambda: client.engines()[0].record.draining)
    engine.hold.set()
    assert [token async for output in stream for token in output.token_ids] == [1, 2, 3, 4, 5]
    assert client.counters().engines_lost == 0
    server.close()


async def test_an_engine_that_leaves_the_cluster_is_no_lost_connection(
    engine: CountingEngine, gateway: tuple[ZmqEngineClient, ListedSource]
) -> None:
    server, record = serve_engine(engine, KEY)
    client = await connect(gateway, record)
    gateway[1].show()
    await until(lambda: not client.engines())
    server.close()
    await client.close()
    assert client.counters().engines_lost == 0


async def test_counters_keep_what_was_counted_of_an_engine_that_leaves(
    engine: CountingEngine, gateway: tuple[ZmqEngineClient, ListedSource]
) -> None:
    server, record = serve_engine(engine, KEY)
    client = await connect(gateway, record)
    server.close()
    await until(lambda: client.counters().engines_lost == 1)
    client.apply(DirectorySnapshot(100, [], []))
    assert client.counters().engines_lost == 1
    await until(lambda: not any("engine-0" in task.get_name() for task in asyncio.all_tasks()))
    assert client.counters().engines_lost == 1


async def test_an_engine_is_busy_for_as_long_as_it_has_work(
    engine: CountingEngine, gateway: tuple[ZmqEngineClient, ListedSource]
) -> None:
    """Also if each of its requests ends in the turn in which it came."""
    server, record = serve_engine(engine, KEY)
    client = await connect(gateway, record)
    await asyncio.sleep(0.2)
    assert server.pulse().busy_s == 0.0
    for number in range(20):
        stream = client.submit(record, make_request(f"r{number}", max_tokens=1))
        assert [token async for output in stream for token in output.token_ids] == [1]
    assert 20 * STEP_S <= server.pulse().busy_s < 5.0
    server.close()


# ---- what gateways choose ----

PROMPT = list(range(1, 200))


def view(rank: int, role: Role, *, draining: bool = False, fingerprint: str = "f", busy: int = 0) -> EngineView:
    record = msgspec.structs.replace(make_record(rank, role, 1000), draining=draining, fingerprint=fingerprint)
    return EngineView(record, None, busy)


def router() -> Router:
    return Router(
        "g", rates=LearntRates(CostRates(), time.monotonic), session_patience_s=0.0, local_prefill_max_tokens=8192
    )


def chosen(engines: list[EngineView]) -> tuple[int, Path] | None:
    request = EngineRequest(request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams())
    choice = router()
    route = choice.route(engines, choice.query(request))
    return None if route is None else (route.placement.engine.rank, route.path)


def test_an_engine_that_drains_is_not_chosen_where_another_can_serve() -> None:
    assert chosen([view(0, Role.UNIFIED, draining=True), view(1, Role.UNIFIED, busy=9)]) == (1, Path.UNIFIED)
    engines = [view(0, Role.PREFILL, draining=True), view(1, Role.PREFILL, busy=9), view(2, Role.DECODE)]
    assert chosen(engines) == (1, Path.DISAGGREGATED)


def test_an_engine_that_drains_is_better_than_none() -> None:
    assert chosen([view(0, Role.UNIFIED, draining=True)]) == (0, Path.UNIFIED)
    engines = [view(0, Role.PREFILL, draining=True), view(1, Role.DECODE, draining=True)]
    assert chosen(engines) == (0, Path.DISAGGREGATED)


@pytest.mark.parametrize("new_drains", [False, True])
def test_versions_side_by_side_are_paired_within_their_fingerprints(new_drains: bool) -> None:
    engines = [
        view(0, Role.PREFILL, draining=not new_drains, fingerprint="old"),
        view(1, Role.DECODE, draining=not new_drains, fingerprint="old"),
        view(2, Role.PREFILL, draining=new_drains, fingerprint="new"),
        view(3, Role.DECODE, draining=new_drains, fingerprint="new"),
    ]
    rank = 0 if new_drains else 2
    assert chosen(engines) == (rank, Path.DISAGGREGATED)
    choice = router()
    wanted = choice.query(EngineRequest(request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams()))
    for source, reader in ((0, 1), (2, 3)):
        placement = choice.decode_placement(engines, wanted, engines[source].record)
        assert placement is not None
        assert placement.engine.rank == reader, "whoever drains: blocks go where they can be read"
    assert choice.decode_placement([engines[3]], wanted, engines[0].record) is None


def test_versions_of_equal_fingerprints_pair_freely() -> None:
    engines = [view(0, Role.PREFILL), view(1, Role.DECODE, draining=True), view(2, Role.DECODE, busy=50)]
    choice = router()
    wanted = choice.query(EngineRequest(request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams()))
    placement = choice.decode_placement(engines, wanted, engines[0].record)
    assert placement is not None
    assert placement.engine.rank == 2
