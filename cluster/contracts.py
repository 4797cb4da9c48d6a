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
from baton.kv_transfer.handoff import TransferStats

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


class EngineGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Engines that start and end together, in the order of their data-parallel ranks: one replica of a fleet."""

    group_id: str
    first_rank: int  # of the fleet: its groups follow each other from there
    engines: list[EngineRecord]

    @property
    def epoch(self) -> int:
        return self.engines[0].epoch


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


class GatewayRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway that answers HTTP."""

    identity: str  # of one process: drawn at its start
    node_id: str
    node_ip: str
    pid: int
    host: str  # that it listens at
    port: int
    reach: Reach
    application: str = ""  # digest of the arguments that it was started with


class DirectorySnapshot(msgspec.Struct, frozen=True):
    """Everyone alive, as of `version`. A later snapshot replaces an earlier one as a whole."""

    version: int
    engines: list[EngineRecord]
    gateways: list[GatewayRecord]  # an engine aborts the requests of one that left


class EngineView(msgspec.Struct, frozen=True):
    """An engine as a router sees it."""

    record: EngineRecord
    stats: EngineStats | None  # the newest it sent; None before its first step
    outstanding: int  # requests of this gateway that it has not finished
    transfers: TransferStats | None = None  # the newest it sent; None where it hands nothing over
    cached: CachedBlocks = CachedBlocks(0)  # what its prefix cache holds


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

    def submit(self, engine: EngineRecord, request: EngineRequest) -> OutputStream:
        """Sends when called; yields outputs up to and including the one with a finish reason.

        The stream raises `EngineGone`, also in the middle. Closing it early (`aclose`) aborts the request at the
        engine.
        """
        ...

    def abort(self, engine: EngineRecord, request_id: str, generation: int = 0) -> None:
        """Ends a request whose iterator is done or closed: a finished prefill withdraws the KV blocks that it offers.

        Sent at once, in order with `submit`, and never answered. Unknown ids and dead engines are ignored.
        """
        ...
