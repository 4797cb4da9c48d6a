"""What the parts of the cluster know of each other.

gateway ── EngineClient ──ZMQ──> worker (EngineCore)
gateway, worker <── DirectorySnapshot ── directory <── EngineRecord ── worker (through its replica)
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from baton.engine.core.messages import EngineOutput, EngineRequest, EngineStats
from baton.kv_transfer.handoff import TransferStats


class Role(enum.StrEnum):
    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that is ready to serve. A process that starts anew has a new `epoch` and is another engine."""

    engine_id: str  # stable across restarts of the same replica slot only by accident; never compared without the epoch
    epoch: int  # random, 63 bits, drawn at process start
    role: Role
    rank: int  # global over the application
    node_id: str
    node_ip: str
    pid: int
    address: str  # ZMQ endpoint of the engine's request socket, tcp://ip:port
    kv_address: str  # ZMQ endpoint of its transfer control socket
    fingerprint: str  # of its KV layout; a prefill and a decode engine pair only where equal
    model_id: str
    max_model_len: int
    num_blocks: int


class DirectorySnapshot(msgspec.Struct, frozen=True):
    """Everyone alive, as of `version`. A later snapshot replaces an earlier one as a whole."""

    version: int
    engines: list[EngineRecord]
    gateways: list[str]  # identities; an engine aborts the requests of one that left


class EngineView(msgspec.Struct, frozen=True):
    """An engine as a router sees it."""

    record: EngineRecord
    stats: EngineStats | None  # the newest it sent; None before its first step
    outstanding: int  # requests of this gateway that it has not finished
    transfers: TransferStats | None = None  # the newest it sent; None where it hands nothing over


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
        """Those alive now, in rank order."""
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
