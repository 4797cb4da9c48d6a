"""Each process exports its own metrics, and a scrape of any gateway returns those of all processes. No Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from baton.cluster import process_metrics
from baton.cluster.contracts import DirectorySnapshot, EngineRecord, GatewayRecord
from baton.cluster.engine_client import ZmqEngineClient
from baton.cluster.engines.metrics import EngineMetrics
from baton.cluster.engines.server import EngineServer
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.cluster.membership.members import DirectoryMetrics, Membership
from baton.cluster.process_metrics import ApplicationMetrics, MetricsExporter, MetricsReader, NoMetrics, collect
from baton.engine.core.messages import EngineStats
from baton.engine.net.curve import ClusterKey

from ...helpers.fakes import CountingEngine, ListedSource, make_gateway, make_request, serve_engine

pytestmark = pytest.mark.timeout(60)
KEY = ClusterKey.generate()
HOST = "127.0.0.1"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: bytes) -> Samples:
    """Return values by name and labels. Fails if a family or a series comes twice."""
    families = list(text_string_to_metric_families(text.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    found = [((each.name, tuple(sorted(each.labels.items()))), each.value) for each in _all(families)]
    assert len(found) == len(dict(found))
    return dict(found)


def _all(families: list[Metric]) -> Iterator[object]:
    for family in families:
        yield from family.samples


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def counters(found: Samples) -> Samples:
    return {key: value for key, value in found.items() if key[0].endswith("_total")}


def of_engine(found: Samples, name: str) -> Samples:
    return {key: value for key, value in found.items() if ("engine", name) in key[1]}


def up(found: Samples) -> dict[str, float]:
    return {dict(labels)["process"]: value for (name, labels), value in found.items() if name == "baton_process_up"}


class TokenCountingEngine(CountingEngine):
    def stats(self) -> EngineStats:
        return msgspec.structs.replace(super().stats(), generation_tokens=sum(self._done.values()))


@dataclass
class ServedEngine:
    engine: TokenCountingEngine
    server: EngineServer
    record: EngineRecord
    exporter: MetricsExporter


class Application:
    """Engines, gateways and a directory, each with its exporter."""

    def __init__(self) -> None:
        self.engines: list[ServedEngine] = []
        self.exporters: list[MetricsExporter] = []
        self.gateways: list[GatewayRecord] = []
        self.metrics: list[GatewayMetrics] = []
        self.scrapes: list[ApplicationMetrics] = []
        directory = self.export(DirectoryMetrics(Membership(time.monotonic, 0)))
        self.listed = DirectorySnapshot(0, [], [], "baton-directory:app", directory.address)

    def export(self, registry: Collector, *, answers: bool = True, **labels: str) -> MetricsExporter:
        """Open the socket of a process. Unless it `answers`, the process hangs."""
        exporter = MetricsExporter(registry, host=HOST, key=KEY, labels=labels)
        if answers:
            exporter.start()
        self.exporters.append(exporter)
        return exporter

    def add_engine(self, node: str = "node", *, answers: bool = True) -> ServedEngine:
        engine, rank = TokenCountingEngine(), len(self.engines)
        server, record = serve_engine(engine, KEY, epoch=rank + 1, rank=rank)
        labels = ["m", record.engine_id, record.role]
        exporter = self.export(EngineMetrics(labels, lambda: server.status, server.counters), answers=answers)
        record = msgspec.structs.replace(record, metrics_address=exporter.address, node_id=node)
        self.engines.append(ServedEngine(engine, server, record, exporter))
        self.list_members()
        return self.engines[-1]

    def add_gateway(self, name: str, node: str = "node") -> ApplicationMetrics:
        metrics = GatewayMetrics("m", list)
        exporter = self.export(metrics.registry, gateway=name)
        self.gateways.append(msgspec.structs.replace(make_gateway(name, node=node), metrics_address=exporter.address))
        self.list_members()
        self.metrics.append(metrics)
        own = lambda names: collect(metrics.registry, {"gateway": name}, names)  # noqa: E731
        self.scrapes.append(ApplicationMetrics(own, identity=name, node_id=node, listed=lambda: self.listed, key=KEY))
        return self.scrapes[-1]

    def list_members(self) -> None:
        records = [each.record for each in self.engines]
        self.listed = msgspec.structs.replace(self.listed, engines=records, gateways=list(self.gateways))

    async def close(self) -> None:
        for each in self.engines:
            each.engine.hang.set()
            each.server.close()
        for exporter in self.exporters:
            await exporter.close()
        for scrape in self.scrapes:
            scrape.close()


@pytest.fixture
async def app() -> AsyncIterator[Application]:
    app = Application()
    yield app
    await app.close()


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> float:
    """Shorten the time that a scrape waits for a process, and return it."""
    monkeypatch.setattr(process_metrics, "ANSWER_S", 0.5)
    return 0.5


@pytest.mark.slow
async def test_gateways_scraped_in_turn_give_the_same_series_and_counters_that_never_go_back(app: Application) -> None:
    first, second = app.add_engine(), app.add_engine()
    one, other = app.add_gateway("gateway-a"), app.add_gateway("gateway-b")
    source = ListedSource()
    source.show(first.record, second.record)
    client = ZmqEngineClient(source, KEY, "gateway-a")
    await client.start()
    await until(lambda: len(client.engines()) == 2)
    before: Samples = {}
    series = None
    for number in range(12):
        app.metrics[number % 2].prompt_tokens.inc(number)
        async for _ in client.submit((first, second)[number % 3 % 2].record, make_request(f"r{number}")):
            pass
        found = samples(await (one, other)[number % 2].render())
        series = series or found.keys()
        assert found.keys() == series
        assert all(value >= before.get(key, 0.0) for key, value in counters(found).items())
        before = counters(found)
        assert up(found) == dict.fromkeys(
            ["baton-directory:app", "gateway-a", "gateway-b", "engine-0", "engine-1"], 1.0
        )
    await client.close()
    own = [f'baton_prompt_tokens_total{{gateway="{name}"' for name in ("gateway-a", "gateway-b")]
    lines = (await one.render()).decode().splitlines()
    assert [float(line.split()[-1]) for name in own for line in lines if line.startswith(name)] == [30.0, 36.0]
    await until(lambda: [each.server.status.stats.generation_tokens for each in (first, second)] == [40, 20])
    assert await one.render() == await other.render()
    lines = (await other.render()).decode().splitlines()
    tokens = [line.split()[-1] for line in lines if line.startswith("baton_engine_generation_tokens_total{")]
    assert tokens == ["40.0", "20.0"]


async def test_at_rest_every_gateway_gives_the_very_same_text(app: Application) -> None:
    app.add_engine()
    one, other = app.add_gateway("gateway-a"), app.add_gateway("gateway-b")
    assert await one.render() == await other.render() == await one.render()


async def test_a_process_that_is_gone_or_hangs_is_left_out_and_said_to_be_down(
    app: Application, briefly: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory still lists it for a while."""
    gone, _hanging, well = app.add_engine(), app.add_engine(answers=False), app.add_engine()
    gateway = app.add_gateway("gateway-a")
    assert of_engine(samples(await gateway.render()), "engine-0")
    await gone.exporter.close()
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        began_s = time.monotonic()
        found = samples(await gateway.render())
        assert time.monotonic() - began_s < 4 * briefly, "both are waited for at the same time"
        assert up(found) == {
            "baton-directory:app": 1, "gateway-a": 1, "engine-0": 0, "engine-1": 0, "engine-2": 1,
        }  # fmt: skip
        assert not of_engine(found, "engine-0")
        assert not of_engine(found, "engine-1")
        assert of_engine(found, well.record.engine_id)
    assert sum("is missing in the metrics" in record.message for record in caplog.records) == 2, "once each"


async def test_a_process_that_left_has_no_series(app: Application) -> None:
    app.add_engine()
    gateway = app.add_gateway("gateway-a")
    assert "engine-0" in up(samples(await gateway.render()))
    app.engines[0].server.close()
    app.engines.clear()
    app.list_members()
    assert "engine-0" not in (await gateway.render()).decode()


def addresses_asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the address of each process that is asked from now on."""
    asked: list[str] = []
    read = MetricsReader.read

    async def counted(
        reader: MetricsReader, address: str, names: frozenset[str] = frozenset()
    ) -> list[process_metrics.MetricFamily]:
        asked.append(address)
        return await read(reader, address, names)

    monkeypatch.setattr(MetricsReader, "read", counted)
    return asked


async def test_scrapes_at_the_same_time_ask_each_process_twice_at_most(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for the first scrapes, and once for all that came meanwhile. The route needs no key."""
    app.add_engine()
    gateway = app.add_gateway("gateway-a")
    asked = addresses_asked(monkeypatch)
    await asyncio.gather(*(gateway.render() for _ in range(20)))
    assert len(asked) <= 2 * len(set(asked)) == 4, "of the engine and of the directory"
    asked.clear()
    await asyncio.gather(*(gateway.render(names={f"baton_{number}"}) for number in range(20)))
    assert len(asked) <= 3 * len(set(asked)) == 6, "the second asks for everything, which the others share"


async def test_scrapes_that_allow_an_age_share_answers_and_may_name_families(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.add_engine()
    gateway = app.add_gateway("gateway-a")
    asked = addresses_asked(monkeypatch)
    first = await gateway.render(max_age_s=60)
    assert await gateway.render(max_age_s=60) == first
    assert len(asked) == 2
    up = (await gateway.render(names={"baton_process_up"}, max_age_s=60)).decode()
    assert len(asked) == 2
    assert up.count("# TYPE ") == 1
    assert up in first.decode()
    await gateway.render()
    assert len(asked) == 4, "without an age each scrape asks anew"


async def test_gateways_of_all_nodes_share_the_processes_among_them(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in ("west", "west", "east", "none"):
        app.add_engine(node)
    for name, node in {"gateway-a": "west", "gateway-b": "west", "gateway-c": "east"}.items():
        app.add_gateway(name, node)
    west, west_again, east = [samples(await scrape.render(of_node=True)) for scrape in app.scrapes]
    assert west.keys() == west_again.keys()
    assert up(west).keys() >= {"gateway-a", "gateway-b", "engine-0", "engine-1"}
    assert up(east).keys() >= {"gateway-c", "engine-2"}
    assert not west.keys() & east.keys()
    assert west.keys() | east.keys() == samples(await app.scrapes[0].render()).keys()
    asked = addresses_asked(monkeypatch)
    await app.scrapes[0].render(of_node=True)
    assert len(asked) == len(up(west)) - 1, "processes of other nodes are not asked, nor is the gateway itself"


async def test_a_stranger_without_the_key_reads_nothing(app: Application, briefly: float) -> None:
    engine = app.add_engine()
    reader = MetricsReader(ClusterKey.generate())
    with pytest.raises(NoMetrics, match="did not answer"):
        await reader.read(engine.record.metrics_address)
    reader.close()


class Broken(Collector):
    def collect(self) -> Iterator[Metric]:
        raise RuntimeError("the device is gone")


async def test_a_process_whose_metrics_cannot_be_collected_is_down_and_says_why(
    app: Application, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = app.export(Broken())
    reader = MetricsReader(KEY)
    for _ in range(2):
        with pytest.raises(NoMetrics):
            await reader.read(exporter.address)
    reader.close()
    assert "the device is gone" in caplog.text


async def test_an_answer_that_is_no_metrics_is_refused() -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        KEY.secure_server(socket)
        socket.bind(f"tcp://{HOST}:*")
        reader = MetricsReader(KEY)
        reading = asyncio.create_task(reader.read(socket.getsockopt_string(zmq.LAST_ENDPOINT)))
        assert await asyncio.to_thread(socket.recv) == b""
        socket.send(b"\x93what is this")
        with pytest.raises(NoMetrics):
            await reading
        reader.close()


def test_labels_are_added_to_every_sample_and_heads_stay() -> None:
    registry = CollectorRegistry()
    Counter("baton_seen_total", "What\nwas seen.", ["kind"], registry=registry).labels("a").inc()
    counter, created = collect(registry, {"gateway": "g"})
    assert counter == process_metrics.MetricFamily(
        "baton_seen_total",
        "# HELP baton_seen_total What\\nwas seen.\n# TYPE baton_seen_total counter\n",
        'baton_seen_total{gateway="g",kind="a"} 1.0\n',
    )
    assert created.name == "baton_seen_created"
    assert collect(CollectorRegistry()) == []


def test_families_are_collected_by_name_and_others_left_alone() -> None:
    registry = CollectorRegistry()
    for name in ("baton_seen", "baton_seen_twice"):
        Counter(f"{name}_total", "What was seen.", registry=registry).inc()
    Histogram("baton_wait_seconds", "How long.", registry=registry).observe(1.0)
    for names in (["baton_seen_total"], ["baton_seen_created"], ["baton_wait_seconds", "baton_seen_twice_total"]):
        assert sorted(family.name for family in collect(registry, {"gateway": "g"}, names)) == sorted(names)
    assert collect(registry, names=["baton_none", "baton_seen"]) == []


async def test_processes_are_asked_for_the_families_of_a_scrape_alone(app: Application) -> None:
    engine, gateway = app.add_engine(), app.add_gateway("gateway-a")
    reader = MetricsReader(KEY)
    whole = await reader.read(engine.record.metrics_address)
    wanted = frozenset([whole[0].name, "baton_none"])
    assert await reader.read(engine.record.metrics_address, wanted) == whole[:1]
    reader.close()
    part = await gateway.render(names=wanted, max_age_s=60)
    assert part.startswith(f"# HELP {whole[0].name} ".encode())
    everything = await gateway.render(max_age_s=60)
    assert part in everything
    assert len(everything) > len(part)
    app.metrics[0].prompt_tokens.inc(5)  # a full answer also serves a filtered request
    assert b" 5.0\n" not in await gateway.render(names={"baton_prompt_tokens_total"}, max_age_s=60)
    assert b" 5.0\n" in await gateway.render(names={"baton_prompt_tokens_total"})
