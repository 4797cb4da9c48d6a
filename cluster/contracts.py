"""Contracts between the parts of the cluster.

gateway ── EngineClient ──ZMQ──> worker (EngineCore)
gateway, worker <── DirectorySnapshot ── directory <── EngineRecord ── worker (through its replica)
                                                   <── GatewayRecord ── gateway
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from baton.engine.core.messages import EngineOutput, EngineRequest, EngineStats
from baton.kv_transfer.protocol.stats import TransferStats

from .cached_blocks import CachedBlocks


class Role(enum.StrEnum):
    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def writes_answers(self) -> bool:
        return self is not Role.PREFILL

    @property
    def complement(self) -> Role | None:
        """Return the role that does the other half of a request; None where there is none."""
        return {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(self)


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that is ready to serve. A process that starts anew has a new `epoch`, and is another engine."""

    engine_id: str  # may be the same after a restart: never compared without the epoch
    group_id: str  # of the processes that live and die together: one engine, or the data-parallel ranks of one model
    epoch: int  # random, 63 bits, drawn at process start
    role: Role
    rank: int  # global over the application; -1: the directory has not given it one yet
    node_id: str
    node_ip: str
    pid: int
    follower_pids: list[int] = []  # of the other tensor-parallel ranks
    address: str  # ZMQ endpoint of the engine's request socket, tcp://ip:port
    kv_address: str  # ZMQ endpoint of its transfer control socket
    metrics_address: str = ""  # ZMQ endpoint of its `MetricsExporter`; empty: it has none
    fingerprint: str  # of its KV layout; a prefill and a decode engine pair only where equal
    model_id: str
    max_model_len: int
    max_num_seqs: int  # requests of one step
    max_num_batched_tokens: int  # tokens of one step
    num_blocks: int
    num_tier_blocks: int = 0  # capacity of its KV tiers
    draining: bool = False  # it ends its requests, and is to get no other where another engine can take it


class EngineGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Engines that start and end together, in the order of their data-parallel ranks: one replica of a fleet."""

    group_id: str
    first_rank: int  # of the fleet: its groups follow each other from there
    engines: list[EngineRecord]

    @property
    def epoch(self) -> int:
        return self.engines[0].epoch

    @property
    def draining(self) -> bool:
        return self.engines[0].draining

    def with_draining(self, draining: bool) -> EngineGroup:
        """Return the group with all of its engines draining, or none."""
        engines = [msgspec.structs.replace(engine, draining=draining) for engine in self.engines]
        return msgspec.structs.replace(self, engines=engines)


class StartingGroup(msgspec.Struct, frozen=True):
    """A group that has no engines yet."""

    group_id: str
    role: Role
    node_ip: str  # of its control plane
    state: str  # what it does: "fetches Qwen/Qwen3-8B: 3.10 of 16.38 GB or more, 210 MB/s"


class EngineTrace(msgspec.Struct, frozen=True):
    """A recording of what one engine did, in the format of Chrome's traces, which Perfetto opens."""

    engine_id: str
    node_ip: str
    path: str  # on that machine; it is written when the recording ends
    seconds: float = 0.0  # of the recording
    size_bytes: int = 0


class EnginePulse(msgspec.Struct, frozen=True):
    """The state of an engine, as its own process reports it."""

    stalled_s: float  # since its step loop last moved
    num_requests: int  # that came and have not ended
    leases_held: int  # tickets whose blocks wait for their readers
    receives_active: int  # hand-offs on their way in
    busy_s: float = 0.0  # for which it had work, since the process's start
    stats: EngineStats | None = None  # None: no step has run

    @property
    def num_live(self) -> int:
        """Count the requests, leases and hand-offs that would be lost if the process ended now."""
        return self.num_requests + self.leases_held + self.receives_active


class Drained(msgspec.Struct, frozen=True):
    """The end of a group that has drained."""

    seconds: float
    handed_over: int  # requests that were returned, and went on elsewhere


class DrainCounters(msgspec.Struct, frozen=True):
    """Counts of groups that have drained, since the directory's start."""

    groups: int = 0
    seconds: float = 0.0
    handed_over: int = 0

    def plus(self, drained: Drained) -> DrainCounters:
        return DrainCounters(self.groups + 1, self.seconds + drained.seconds, self.handed_over + drained.handed_over)


class LoadBalancing(enum.StrEnum):
    """The ranks that a gateway reaches; an outside balancer chooses among gateways.

        internal   every gateway     ──> every rank
        hybrid     a gateway a node  ──> the ranks of its node      behind a balancer over the nodes
        external   a gateway a rank  ──> its rank                   behind a balancer over the ranks

    This concerns ranks that write answers. Every gateway reaches all prefill engines in every mode: whichever of them
    reads a prompt, its blocks go to a decode engine that the gateway reaches.
    """

    INTERNAL = "internal"
    HYBRID = "hybrid"
    EXTERNAL = "external"


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that one gateway reaches. By default, all."""

    mode: LoadBalancing = LoadBalancing.INTERNAL
    node_id: str = ""  # hybrid: the node of the ranks
    rank: int = -1  # external: the rank

    def includes(self, engine: EngineRecord) -> bool:
        if not engine.role.writes_answers:
            return True
        match self.mode:
            case LoadBalancing.INTERNAL:
                return True
            case LoadBalancing.HYBRID:
                return engine.node_id == self.node_id
            case LoadBalancing.EXTERNAL:
                return engine.rank == self.rank


class Bounds(msgspec.Struct, frozen=True):
    """The least and the most groups of one fleet."""

    min_replicas: int
    max_replicas: int

    def clip(self, count: int) -> int:
        return max(self.min_replicas, min(self.max_replicas, count))


class ScalePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The autoscaling settings of an application; `AutoscalingSpec` explains them."""

    fleets: dict[Role, Bounds]
    ttft_s: float
    inter_token_s: float
    percentile: float
    target_utilization: float
    look_back_period_s: float
    upscale_delay_s: float
    downscale_delay_s: float
    downscale_to_zero_delay_s: float

    @property
    def memory_s(self) -> float:
        """Return how long a sample may influence decisions."""
        return max(self.downscale_delay_s, self.downscale_to_zero_delay_s) + self.look_back_period_s + 5.0


class QueueBound(msgspec.Struct, frozen=True):
    """The queue in an engine from which on it takes no more prompts."""

    requests: int
    tokens: int  # of prompts, that are to be computed

    def is_reached(self, stats: EngineStats) -> bool:
        return stats.num_requests_waiting >= self.requests or stats.num_waiting_tokens >= self.tokens


class GatewayRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway. It is listed before it connects to engines, which is before its port is open."""

    identity: str  # of one process: drawn at its start
    node_id: str
    node_ip: str
    pid: int
    host: str  # at which it listens
    port: int
    reach: Reach
    application: str = ""  # digest of the settings that it was started with and keeps
    life_address: str = ""  # for probes, which libzmq answers however busy its Python is, tcp://ip:port
    is_serving: bool = False  # its HTTP port is open
    metrics_address: str = ""  # of its `MetricsExporter`; empty before it serves
    scaling: ScalePlan | None = None  # None: every fleet has a fixed size


class DirectorySnapshot(msgspec.Struct, frozen=True):
    """All live members as of `version`. A snapshot replaces one of another version as a whole."""

    version: int
    engines: list[EngineRecord]
    gateways: list[GatewayRecord]  # engines abort the requests of a gateway that left
    directory: str = ""  # name of its actor
    metrics_address: str = ""  # of the directory's `MetricsExporter`
    starting: list[StartingGroup] = []


class ClientCounters(msgspec.Struct):
    """Counts of a gateway's messages with engines that were lost or refused, since its process's start."""

    malformed_messages: int = 0
    stale_messages: int = 0  # of another epoch, or about a request that is over here
    engines_lost: int = 0  # connections that broke, but for engines that the directory dropped
    block_gaps: int = 0  # changes of prefix caches that were missed: snapshots were asked for


class EngineView(msgspec.Struct, frozen=True):
    """An engine as a router knows it."""

    record: EngineRecord
    stats: EngineStats | None  # the newest; None before its first step
    outstanding: int  # requests of this gateway that it has not finished
    transfers: TransferStats | None = None  # the newest; None where it hands nothing over
    cached: CachedBlocks = CachedBlocks(0)  # contents of its prefix cache and its tiers

    @property
    def num_running(self) -> int:
        """The number of requests that the engine works on, of which it has told or this gateway knows.

        Statistics are those between two steps, when an engine that reads whole prompts has none: those that this
        gateway has in it, and that do not wait there, are in a step or on the way.
        """
        if self.stats is None:
            return min(self.record.max_num_seqs, self.outstanding)
        at_work = self.outstanding - self.stats.num_requests_waiting - self.stats.num_requests_waiting_for_kv
        return max(self.stats.num_requests_running, min(self.record.max_num_seqs, at_work))


class EngineGone(Exception):
    """The engine's process has ended or was replaced. Its requests are lost; another engine may take them."""


class OutputStream(Protocol):
    """The outputs of one request; ends after the one with a finish reason."""

    def __aiter__(self) -> AsyncIterator[EngineOutput]: ...

    async def __anext__(self) -> EngineOutput: ...

    async def aclose(self) -> None:
        """Abort the request, where its last output was not taken yet. Closing twice changes nothing."""
        ...


class EngineClient(Protocol):
    """A gateway's connection to all engines. One asyncio loop uses it."""

    def engines(self) -> Sequence[EngineView]:
        """Return the live engines that this gateway reaches, in rank order."""
        ...

    def listed(self) -> DirectorySnapshot:
        """Return all live members, reached or not."""
        ...

    def counters(self) -> ClientCounters:
        """Return sums over all engines, including engines that have left."""
        ...

    def last_message_s(self, engine: EngineRecord) -> float:
        """Return when the engine's newest message came, on `time.monotonic`'s clock; 0 if none ever did."""
        ...

    def submit(self, engine: EngineRecord, request: EngineRequest) -> OutputStream:
        """Send the request at once; return its outputs, up to and including the one with a finish reason.

        The stream may raise `EngineGone` at any point. Closing it early (`aclose`) aborts the request at the engine.
        """
        ...

    def begin(self, engine: EngineRecord, request_id: str, generation: int, token_id: int) -> None:
        """Give a request that was submitted with `awaits_first_token` its first token.

        Sent at once, in order with `submit`, and never answered. Unknown ids and dead engines are ignored.
        """
        ...

    def abort(self, engine: EngineRecord, request_id: str, generation: int = 0) -> None:
        """End a request whose stream is done or closed: a finished prefill withdraws the KV blocks that it offers.

        Sent at once, in order with `submit`, and never answered. Unknown ids and dead engines are ignored.
        """
        ...
