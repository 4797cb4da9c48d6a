"""What the parts of the cluster know of each other.

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
        """Whose engines do the other half of a request; None where there is none."""
        return {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(self)


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that is ready to serve. A process that starts anew has a new `epoch` and is another engine."""

    engine_id: str  # stable across restarts of the same replica slot only by accident; never compared without the epoch
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
    fingerprint: str  # of its KV layout; a prefill and a decode engine pair only where equal
    model_id: str
    max_model_len: int
    num_blocks: int
    num_tier_blocks: int = 0  # that its KV tiers have room for
    draining: bool = False  # it ends what it has and is to get nothing more, where others can take it


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
        """The group, all of whose engines drain, or none."""
        engines = [msgspec.structs.replace(engine, draining=draining) for engine in self.engines]
        return msgspec.structs.replace(self, engines=engines)


class EnginePulse(msgspec.Struct, frozen=True):
    """One engine as its own process knows it."""

    stalled_s: float  # since its step loop last moved
    num_requests: int  # that came and have not been answered to the end
    leases_held: int  # tickets whose blocks wait for their readers
    receives_active: int  # hand-offs on their way in
    busy_s: float = 0.0  # in which it had work, since the process's start
    stats: EngineStats | None = None  # None: it has not begun

    @property
    def num_live(self) -> int:
        """What would be lost to somebody if the process ended now."""
        return self.num_requests + self.leases_held + self.receives_active


class Drained(msgspec.Struct, frozen=True):
    """How a group of engines left."""

    seconds: float
    handed_over: int  # requests that had to go on elsewhere


class DrainCounters(msgspec.Struct, frozen=True):
    """Groups of engines that left in order, from the directory's start."""

    groups: int = 0
    seconds: float = 0.0
    handed_over: int = 0

    def plus(self, drained: Drained) -> DrainCounters:
        return DrainCounters(self.groups + 1, self.seconds + drained.seconds, self.handed_over + drained.handed_over)


class LoadBalancing(enum.StrEnum):
    """Which ranks a gateway reaches; what is left to choose is an outside balancer's.

        internal   every gateway     ──> every rank
        hybrid     a gateway a node  ──> the ranks of its node      behind a balancer over the nodes
        external   a gateway a rank  ──> its rank                   behind a balancer over the ranks

    Ranks here are those that write answers. Prefill engines are everybody's in every mode: whichever of them reads a
    prompt, the blocks go to a decode engine that the gateway reaches.
    """

    INTERNAL = "internal"
    HYBRID = "hybrid"
    EXTERNAL = "external"


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway's part of the engines. By default: all."""

    mode: LoadBalancing = LoadBalancing.INTERNAL
    node_id: str = ""  # hybrid: whose ranks
    rank: int = -1  # external: which

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
    """Of one fleet, in groups."""

    min_replicas: int
    max_replicas: int

    def clip(self, count: int) -> int:
        return max(self.min_replicas, min(self.max_replicas, count))


class ScalePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an application wants of its autoscaling; see `AutoscalingSpec`."""

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
        """How old a sample is that may still decide."""
        return max(self.downscale_delay_s, self.downscale_to_zero_delay_s) + self.look_back_period_s + 5.0


class GatewayRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway: from when engines may hear from it, which is before its port is open."""

    identity: str  # of one process: drawn at its start
    node_id: str
    node_ip: str
    pid: int
    host: str  # that it listens at
    port: int
    reach: Reach
    application: str = ""  # digest of the arguments that it was started with
    life_address: str = ""  # where its process answers however busy its Python is, tcp://ip:port
    is_serving: bool = False  # HTTP, at its port
    scaling: ScalePlan | None = None  # what the application wants of its autoscaler; None: every fleet has a fixed size


class DirectorySnapshot(msgspec.Struct, frozen=True):
    """Everyone alive, as of `version`. A snapshot of another version replaces one as a whole."""

    version: int
    engines: list[EngineRecord]
    gateways: list[GatewayRecord]  # an engine aborts the requests of one that left
    drains: DrainCounters = DrainCounters()
    num_kept: int = 0  # members that sent no heartbeats and were kept, since their processes ran


class MessageCounters(msgspec.Struct):
    """What became of messages between an engine and its gateways, as the engine saw it. From its process's start."""

    malformed_messages: int = 0
    stale_messages: int = 0  # meant for another epoch, or about an older generation
    undeliverable_messages: int = 0  # their gateway was gone


class ClientCounters(msgspec.Struct):
    """What became of messages between a gateway and its engines, as the gateway saw it. From its process's start."""

    malformed_messages: int = 0
    stale_messages: int = 0  # of another epoch, or about a request that is over here
    engines_lost: int = 0  # connections; those that the directory took away are none
    block_gaps: int = 0  # news of prefix caches were missing: snapshots were asked for


class EngineView(msgspec.Struct, frozen=True):
    """An engine as a router sees it."""

    record: EngineRecord
    stats: EngineStats | None  # the newest it sent; None before its first step
    outstanding: int  # requests of this gateway that it has not finished
    transfers: TransferStats | None = None  # the newest it sent; None where it hands nothing over
    cached: CachedBlocks = CachedBlocks(0)  # what its prefix cache and its tiers hold
    mail: MessageCounters | None = None  # the newest it sent


class EngineGone(Exception):
    """The engine's process is dead or was replaced. Requests in it are lost; another engine may take them."""


class OutputStream(Protocol):
    """The outputs of one request; ends after the one with a finish reason."""

    def __aiter__(self) -> AsyncIterator[EngineOutput]: ...

    async def __anext__(self) -> EngineOutput: ...

    async def aclose(self) -> None:
        """Before the last output was taken: aborts the request at the engine. Afterwards, and again: nothing."""
        ...


class EngineClient(Protocol):
    """A gateway's connection to all engines. One asyncio loop uses it."""

    def engines(self) -> Sequence[EngineView]:
        """Those that are alive now and that this gateway reaches, in rank order."""
        ...

    def listed(self) -> DirectorySnapshot:
        """Everyone alive, reached or not."""
        ...

    def counters(self) -> ClientCounters:
        """Sums over all engines, those that are gone included."""
        ...

    def heard_s(self, engine: EngineRecord) -> float:
        """When the engine's newest message came, on `time.monotonic`'s clock; 0 if none ever did."""
        ...

    def submit(self, engine: EngineRecord, request: EngineRequest) -> OutputStream:
        """Sends when called; yields outputs up to and including the one with a finish reason.

        The stream raises `EngineGone`, also in the middle. Closing it early (`aclose`) aborts the request at the
        engine.
        """
        ...

    def begin(self, engine: EngineRecord, request_id: str, generation: int, token_id: int) -> None:
        """The token that a request submitted with `awaits_first_token` goes on from.

        Sent at once, in order with `submit`, and never answered. Unknown ids and dead engines are ignored.
        """
        ...

    def abort(self, engine: EngineRecord, request_id: str, generation: int = 0) -> None:
        """Ends a request whose iterator is done or closed: a finished prefill withdraws the KV blocks that it offers.

        Sent at once, in order with `submit`, and never answered. Unknown ids and dead engines are ignored.
        """
        ...
