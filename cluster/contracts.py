"""The interfaces between the parts of the cluster: records, statuses and protocols.

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
from baton.kv_transfer.protocol.messages import EngineKey
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
        """Return the role that does the other half of a request; None for `UNIFIED`."""
        return {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(self)


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that is ready to serve. A restarted process has a new `epoch` and counts as another engine."""

    engine_id: str  # can recur after a restart: always compare it together with the epoch
    group_id: str  # of the processes that start and end together: one engine, or the data-parallel ranks of one model
    epoch: int  # random, 63 bits, drawn at process start
    role: Role
    rank: int  # unique in the application; -1: not assigned by the directory yet
    node_id: str
    node_ip: str
    pid: int
    follower_pids: list[int] = []  # of the other tensor-parallel ranks
    address: str  # ZMQ endpoint of the engine's request socket, tcp://ip:port
    kv_address: str  # ZMQ endpoint of its transfer control socket
    metrics_address: str = ""  # ZMQ endpoint of its `MetricsExporter`; empty if it has none
    fingerprint: str  # of its KV layout: a prefill engine hands over only to a decode engine with an equal one
    model_id: str
    max_model_len: int
    max_num_seqs: int  # requests in one step, at most
    max_num_batched_tokens: int  # tokens in one step, at most
    num_blocks: int  # of all cache groups
    num_tier_blocks: int = 0  # capacity of its KV tiers, for blocks of all cache groups
    draining: bool = False  # it finishes its requests, and gets new ones only if no other engine can take them

    @property
    def key(self) -> EngineKey:
        """Return the name of this process, which no other start of the engine has."""
        return EngineKey(self.engine_id, self.epoch)


class EngineGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Engines that start and end together, in the order of their data-parallel ranks: one replica of a fleet."""

    group_id: str
    first_rank: int  # of its fleet: the ranks of the fleet's groups count up from there
    engines: list[EngineRecord]

    @property
    def epoch(self) -> int:
        return self.engines[0].epoch

    @property
    def draining(self) -> bool:
        return self.engines[0].draining

    def with_draining(self, draining: bool) -> EngineGroup:
        """Return the group with `draining` set in all of its engines."""
        engines = [msgspec.structs.replace(engine, draining=draining) for engine in self.engines]
        return msgspec.structs.replace(self, engines=engines)


class StartingGroup(msgspec.Struct, frozen=True):
    """A group that has no engines yet."""

    group_id: str
    role: Role
    node_ip: str  # of the node of its Serve replica
    state: str  # what it does, for people: "fetches Qwen/Qwen3-8B: 3.10 of 16.38 GB or more, 210 MB/s"


class EngineTrace(msgspec.Struct, frozen=True):
    """A profiler's recording of one engine, in Chrome's trace format, which Perfetto opens."""

    engine_id: str
    node_ip: str
    path: str  # on that machine; the file is written when the recording ends
    seconds: float = 0.0  # length of the recording
    size_bytes: int = 0


class EnginePulse(msgspec.Struct, frozen=True):
    """The state of an engine, as its own process reports it."""

    stalled_s: float  # since its step loop began its present turn
    num_requests: int  # unfinished ones
    leases_held: int  # tickets whose blocks wait for a decode engine
    receives_active: int  # hand-offs that this engine is receiving
    busy_s: float = 0.0  # time with work since the process started
    stats: EngineStats | None = None  # None: no step has run

    @property
    def num_live(self) -> int:
        """Count the requests, leases and hand-offs that would be lost if the process ended now."""
        return self.num_requests + self.leases_held + self.receives_active


class Drained(msgspec.Struct, frozen=True):
    """The result of draining one group."""

    seconds: float
    handed_over: int  # requests that were given back, and continued in other engines


class DrainCounters(msgspec.Struct, frozen=True):
    """Sums over all groups that have drained since the directory started."""

    groups: int = 0
    seconds: float = 0.0
    handed_over: int = 0

    def plus(self, drained: Drained) -> DrainCounters:
        return DrainCounters(self.groups + 1, self.seconds + drained.seconds, self.handed_over + drained.handed_over)


class LoadBalancing(enum.StrEnum):
    """The ranks that each gateway reaches; with `hybrid` and `external`, a load balancer chooses the gateway.

        internal   every gateway       ──> every rank
        hybrid     one gateway a node  ──> the ranks of its node      a balancer chooses the node
        external   one gateway a rank  ──> that rank                  a balancer chooses the rank

    This is about ranks that write answers. Every gateway reaches all prefill engines in every mode: the blocks of a
    prompt go from any of them to a decode engine that the gateway reaches.
    """

    INTERNAL = "internal"
    HYBRID = "hybrid"
    EXTERNAL = "external"


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that one gateway reaches: by default, all."""

    mode: LoadBalancing = LoadBalancing.INTERNAL
    node_id: str = ""  # in hybrid mode: the node whose ranks it reaches
    rank: int = -1  # in external mode: the rank that it reaches

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
    """The smallest and the largest number of groups of one fleet."""

    min_replicas: int
    max_replicas: int

    def clip(self, count: int) -> int:
        return max(self.min_replicas, min(self.max_replicas, count))


class ScalePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The autoscaling settings of an application; `AutoscalingSpec` documents them."""

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
        """Return how long a sample can influence decisions."""
        return max(self.downscale_delay_s, self.downscale_to_zero_delay_s) + self.look_back_period_s + 5.0


class QueueBound(msgspec.Struct, frozen=True):
    """The length of an engine's queue from which on it refuses new prompts."""

    requests: int
    tokens: int  # of queued prompts that are still to be computed

    def is_reached(self, stats: EngineStats) -> bool:
        return stats.num_requests_waiting >= self.requests or stats.num_waiting_tokens >= self.tokens


class GatewayRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway. The directory lists it before it connects to engines and opens its port."""

    identity: str  # of one process: random, drawn at its start
    node_id: str
    node_ip: str
    pid: int
    host: str  # at which it listens
    port: int
    reach: Reach
    application: str = ""  # digest of the settings that cannot change while it runs
    life_address: str = ""  # tcp://ip:port for liveness probes, which libzmq answers even while Python is busy
    is_serving: bool = False  # its HTTP port is open
    metrics_address: str = ""  # of its `MetricsExporter`; empty before it serves
    scaling: ScalePlan | None = None  # None: every fleet has a fixed size


class DirectorySnapshot(msgspec.Struct, frozen=True):
    """All live members as of `version`. A snapshot replaces the previous one as a whole."""

    version: int
    engines: list[EngineRecord]
    gateways: list[GatewayRecord]  # engines abort the requests of a gateway that is no longer listed
    directory: str = ""  # name of its actor
    metrics_address: str = ""  # of the directory's `MetricsExporter`
    starting: list[StartingGroup] = []
    is_complete: bool = True  # False: the directory has restarted, and some members may not have found it again

    def completed_by(self, before: DirectorySnapshot) -> DirectorySnapshot:
        """Return this snapshot with the members of an earlier one that it lacks, where it is not complete."""
        if self.is_complete:
            return self
        engines, gateways = {each.engine_id for each in self.engines}, {each.identity for each in self.gateways}
        missing = [each for each in before.engines if each.engine_id not in engines]
        return msgspec.structs.replace(
            self,
            engines=sorted([*self.engines, *missing], key=lambda engine: engine.rank),
            gateways=[*self.gateways, *(each for each in before.gateways if each.identity not in gateways)],
        )


class ClientCounters(msgspec.Struct):
    """Counts of a gateway's lost or refused messages with engines, since its process started."""

    malformed_messages: int = 0
    stale_messages: int = 0  # of another epoch, or about a request that is finished here
    engines_lost: int = 0  # broken connections, except to engines that the directory dropped
    block_gaps: int = 0  # missed changes of a prefix cache, after each of which a snapshot was requested


class EngineView(msgspec.Struct, frozen=True):
    """An engine as the router of one gateway sees it."""

    record: EngineRecord
    stats: EngineStats | None  # the newest; None before its first step
    outstanding: int  # unfinished requests of this gateway in the engine
    transfers: TransferStats | None = None  # the newest; None if it hands nothing over
    cached: CachedBlocks = CachedBlocks(0)  # the blocks in its pool and its tiers

    @property
    def num_running(self) -> int:
        """The number of requests in the engine's steps: by its statistics, or by this gateway's count if that is more.

        Statistics are taken between two steps, when an engine that computes whole prompts has no running request. So
        requests of this gateway that are in the engine and not in its queues count as running.
        """
        if self.stats is None:
            return min(self.record.max_num_seqs, self.outstanding)
        at_work = self.outstanding - self.stats.num_requests_waiting - self.stats.num_requests_waiting_for_kv
        return max(self.stats.num_requests_running, min(self.record.max_num_seqs, at_work))


class EngineGone(Exception):
    """The engine's process has ended or was replaced. Its requests are lost, but can be retried elsewhere."""


class OutputStream(Protocol):
    """The outputs of one request; it ends after the output with a finish reason."""

    def __aiter__(self) -> AsyncIterator[EngineOutput]: ...

    async def __anext__(self) -> EngineOutput: ...

    async def aclose(self) -> None:
        """Abort the request unless its last output has been taken. Closing twice is allowed."""
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
        """Return when the engine's newest message arrived, on `time.monotonic`'s clock; 0 if none has."""
        ...

    def submit(self, engine: EngineRecord, request: EngineRequest) -> OutputStream:
        """Send the request at once; return the stream of its outputs.

        The stream may raise `EngineGone` at any point. Closing it early (`aclose`) aborts the request at the engine.
        """
        ...

    def begin(self, engine: EngineRecord, request_id: str, generation: int, token_id: int) -> None:
        """Give a request that was submitted with `awaits_first_token` its first token.

        Sent at once, in order with `submit`, and never answered. Unknown ids and dead engines are ignored.
        """
        ...

    def abort(self, engine: EngineRecord, request_id: str, generation: int = 0) -> None:
        """End a request whose stream is finished or closed: blocks that a finished prefill still offers are released.

        Sent at once, in order with `submit`, and never answered. Unknown ids and dead engines are ignored.
        """
        ...
