"""The metrics of an application's processes: each exports its own, and any gateway answers a scrape with those of all.

    Prometheus ── GET /metrics ──> any gateway
                                     ├── its own registry
                                     └── ZMQ (CURVE) ──> MetricsExporter of each other process that the directory lists:
                                                         gateways, engines that schedule, the directory itself

A scrape asks all processes at the same time. If one does not answer within `ANSWER_S`, its series are missing, and
`baton_process_up` shows it. All gateways answer with the same series, and no counter goes back, because no process
keeps another one's numbers.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from baton.engine.net.curve import ClusterKey
from baton.engine.net.sockets import MAX_SOCKETS, bind_to_free_port, is_ipv6_url

from .contracts import DirectorySnapshot

logger = logging.getLogger(__name__)

ANSWER_S = 2.0  # Prometheus allows 10 s for a scrape, which may have to wait for another one under way
UP = "process_up"
UP_HELP = "1 if the process answered this scrape with its metrics, else 0: its series are missing then."


class MetricFamily(msgspec.Struct, frozen=True):
    """All series of one metric in one process, in Prometheus' text format."""

    name: str
    head: str  # the lines # HELP and # TYPE
    samples: str  # one a line


class ProcessMetrics(msgspec.Struct, frozen=True):
    """The answer of an exporter."""

    families: list[MetricFamily]


class NoMetrics(Exception):
    """A process did not answer, or with something that is no answer."""


def collect(
    registry: Collector, labels: Mapping[str, str] | None = None, names: Collection[str] = ()
) -> list[MetricFamily]:
    """Return a registry's families with these names, or all if none are given, with `labels` added to each sample."""
    text = generate_latest(_Selected(registry, labels or {}, names)).decode()
    _, *parts = f"\n{text}".split("\n# HELP ")
    families = [_family(part) for part in parts]
    return [family for family in families if family.name in names] if names else families


def _family(part: str) -> MetricFamily:
    help_line, type_line, *samples = part.rstrip("\n").split("\n")
    return MetricFamily(help_line.partition(" ")[0], f"# HELP {help_line}\n{type_line}\n", _lines(samples))


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


class _Selected(Collector):
    """A registry with additional labels on its samples, and without metrics of which no family was requested."""

    def __init__(self, registry: Collector, labels: Mapping[str, str], names: Collection[str]) -> None:
        self._registry, self._labels, self._names = registry, labels, names

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            # The names of a metric's families begin with its own name: x_total, x_created.
            if self._names and not any(name.startswith(family.name) for name in self._names):
                continue
            labelled = Metric(family.name, family.documentation, family.type, family.unit)
            labelled.samples = [
                Sample(sample.name, {**sample.labels, **self._labels}, *sample[2:]) for sample in family.samples
            ]
            yield labelled


class MetricsExporter:
    """The socket at which the application's gateways read this process's metrics, on its asyncio loop.

    Constructing it binds it (`address`); `start` begins to answer.
    """

    def __init__(self, registry: Collector, *, host: str, key: ClusterKey, labels: Mapping[str, str] | None = None):
        self._registry, self._labels = registry, labels
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.REP)
        key.secure_server(self._socket)
        self._socket.linger = 0
        try:
            self.address = bind_to_free_port(self._socket, host)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._answer(), name="metrics")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _answer(self) -> None:
        while True:
            asked = await self._socket.recv()
            await self._socket.send(self._encoded(asked))

    def _encoded(self, asked: bytes) -> bytes:
        """Return the families that the question names, or all if it names none."""
        try:
            names = msgspec.msgpack.decode(asked, type=frozenset[str]) if asked else frozenset()
            return msgspec.msgpack.encode(ProcessMetrics(collect(self._registry, self._labels, names)))
        except Exception:
            logger.exception("the metrics of this process cannot be collected")
            return b""  # so the scrape reports that this process is not up


@dataclass(frozen=True)
class Exporting:
    """A process that exports metrics."""

    kind: str  # gateway, engine or directory
    name: str
    address: str
    node_id: str  # empty if unknown

    def is_of(self, node_id: str, nodes: Sequence[str]) -> bool:
        """Return whether the gateways of `node_id` answer for this process when each of `nodes` answers for a share.

        A process belongs to its own node's share if that node has a gateway; otherwise a hash decides.
        """
        if self.node_id in nodes:
            return self.node_id == node_id
        return bool(nodes) and nodes[binascii.crc32(self.name.encode()) % len(nodes)] == node_id


def exporting(snapshot: DirectorySnapshot) -> list[Exporting]:
    """Return the processes that export metrics, in the same order everywhere."""
    found = [Exporting("directory", snapshot.directory, snapshot.metrics_address, "")]
    found += [
        Exporting("gateway", gateway.identity, gateway.metrics_address, gateway.node_id)
        for gateway in sorted(snapshot.gateways, key=lambda gateway: gateway.identity)
    ]
    found += [
        Exporting("engine", engine.engine_id, engine.metrics_address, engine.node_id) for engine in snapshot.engines
    ]
    return [process for process in found if process.address]


Answers = Mapping[Exporting, list[MetricFamily] | None]  # None: the process did not answer


@dataclass(frozen=True)
class _Scrape:
    """The answers of processes that were asked for families with these names, or for all."""

    began_s: float
    names: frozenset[str]
    answers: Answers

    def has(self, names: frozenset[str]) -> bool:
        return not self.names or (bool(names) and names <= self.names)


class ApplicationMetrics:
    """Reads the metrics of all processes of the application, for one gateway. One asyncio loop uses it."""

    def __init__(
        self,
        own: Callable[[Collection[str]], list[MetricFamily]],
        *,
        identity: str,
        node_id: str,
        listed: Callable[[], DirectorySnapshot],
        key: ClusterKey,
    ) -> None:
        """`own(names)` returns the metrics of this gateway itself."""
        self._own, self._identity, self._node_id, self._listed = own, identity, node_id, listed
        self._reader = MetricsReader(key)
        self._silent: set[str] = set()
        self._scrape = asyncio.Lock()
        self._text: tuple[Answers, Collection[str], bytes] | None = None  # newest text, with its answers and names
        self._newest: dict[bool, _Scrape] = {}  # by `of_node`

    def close(self) -> None:
        self._reader.close()

    async def render(self, of_node: bool = False, *, names: Collection[str] = (), max_age_s: float = 0.0) -> bytes:
        """Return metrics in Prometheus' text format: the families with these names, or all.

        `of_node` limits them to the share of this gateway's node, for a Prometheus that scrapes one gateway on each
        node: every process on this node, and a part of those on nodes without a gateway. Answers of processes that are
        at most `max_age_s` old are used again.
        """
        answers = await self._answers(of_node, frozenset(names), max_age_s)
        if self._text is None or self._text[0] is not answers or self._text[1] != names:
            found = [families for families in answers.values() if families]
            self._text = answers, names, merge([*found, collect(ProcessesUp(answers))], names)
        return self._text[2]

    async def _answers(self, of_node: bool, names: frozenset[str], max_age_s: float) -> Answers:
        """Return the processes' answers, at most `max_age_s` old. Concurrent scrapes share them.

        If concurrent scrapes want different names, the processes are asked for everything, so that all can share.
        """
        oldest_s = time.monotonic() - max_age_s
        async with self._scrape:
            newest = self._newest.get(of_node)
            is_fresh = newest is not None and newest.began_s > oldest_s
            if newest is None or not is_fresh or not newest.has(names):
                began_s, asked = time.monotonic(), frozenset[str]() if is_fresh else names
                newest = self._newest[of_node] = _Scrape(began_s, asked, await self._ask_all(of_node, asked))
            return newest.answers

    async def _ask_all(self, of_node: bool, names: frozenset[str]) -> Answers:
        """Ask all processes, or with `of_node` those of this node's share, for families with these names, or all."""
        this = Exporting("gateway", self._identity, "", self._node_id)
        others = [process for process in exporting(self._listed()) if process.name != self._identity]
        asked = others
        if of_node:
            nodes = sorted({process.node_id for process in [this, *others] if process.kind == "gateway"})
            asked = [process for process in others if process.is_of(self._node_id, nodes)]
        answers = await asyncio.gather(*(self._ask(process, names) for process in asked))
        found = {this: self._own(names), **dict(zip(asked, answers, strict=True))}
        self._silent &= {process.name for process in others}
        return dict(sorted(found.items(), key=lambda item: (item[0].kind, item[0].name)))

    async def _ask(self, process: Exporting, names: frozenset[str]) -> list[MetricFamily] | None:
        try:
            families = await self._reader.read(process.address, names)
        except NoMetrics as error:
            if process.name not in self._silent:
                logger.warning("%s %s is missing in the metrics: %s", process.kind, process.name, error)
            self._silent.add(process.name)
            return None
        self._silent.discard(process.name)
        return families


class MetricsReader:
    """Reads exporters, over a new connection each time, so that a lost connection leaves nothing behind."""

    def __init__(self, key: ClusterKey) -> None:
        self._key = key
        self._context = zmq.asyncio.Context()
        self._context.max_sockets = MAX_SOCKETS

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def read(self, address: str, names: frozenset[str] = frozenset()) -> list[MetricFamily]:
        """Return one process's families with these names, or all.

        Raises `NoMetrics`, at the latest after `ANSWER_S`.
        """
        try:
            with contextlib.closing(self._open(address)) as socket:
                async with asyncio.timeout(ANSWER_S):
                    await socket.send(msgspec.msgpack.encode(names) if names else b"")
                    frame = await socket.recv()
            return msgspec.msgpack.decode(frame, type=ProcessMetrics).families
        except TimeoutError:
            raise NoMetrics(f"{address} did not answer within {ANSWER_S:g} s") from None
        except (zmq.ZMQError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NoMetrics(f"{address}: {error}") from error

    def _open(self, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.REQ)
        socket.linger = 0
        self._key.secure_client(socket)
        socket.ipv6 = is_ipv6_url(address)
        socket.connect(address)
        return socket


class ProcessesUp(Collector):
    """Collects which processes have answered, as `process_up`."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(f"baton_{UP}", UP_HELP, labels=["kind", "process"])
        for process, families in self._answers.items():
            family.add_metric([process.kind, process.name], families is not None)
        yield family


def merge(processes: Iterable[list[MetricFamily]], names: Collection[str] = ()) -> bytes:
    """Return the text of the families with these names, or all: each family once, in order, with all samples."""
    heads: dict[str, str] = {}
    samples: dict[str, list[str]] = {}
    for families in processes:
        for family in families:
            if names and family.name not in names:
                continue
            heads.setdefault(family.name, family.head)
            samples.setdefault(family.name, []).append(family.samples)
    return "".join(heads[name] + "".join(samples[name]) for name in sorted(heads)).encode()
