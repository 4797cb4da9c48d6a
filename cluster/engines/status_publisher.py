"""Messages from an engine to its gateways: the outputs of their requests, and the engine's status.

    outputs of a step    to the gateways that asked for them
    the engine's status  to all gateways that said hello: when work comes, every `STATS_PERIOD_S`, when it is done
    cached blocks        all of them to a gateway that says hello or asks; changes to every gateway, with the status

A status that equals the last one is not sent again.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from baton.cluster.wire import Outputs
from baton.engine.core.block_log import BlockLog, BlockNews
from baton.engine.core.messages import EngineOutput, EngineStats
from baton.kv_transfer.protocol.stats import TransferStats

from .engine_socket import EngineSocket

STATS_PERIOD_S = 0.25  # a busy engine sends its status also to gateways that have no request in it


class StatusSource(Protocol):
    """The engine whose status is published."""

    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def block_log(self) -> BlockLog: ...


class StatusPublisher:
    """Sends outputs and status to gateways. One thread uses it; any thread may read `published`."""

    def __init__(
        self,
        socket: EngineSocket,
        engine: StatusSource,
        engine_id: str,
        epoch: int,
        transfers: Callable[[], TransferStats | None],
    ) -> None:
        """`transfers()` is sent along with the engine's statistics."""
        self._socket = socket
        self._engine = engine
        self._engine_id, self._epoch = engine_id, epoch
        self._transfers = transfers
        self._blocks = engine.block_log()
        self._gateways: dict[bytes, None] = {}  # that are subscribed, in order
        self._sent_apart: dict[bytes, None] = {}  # gateways that were sent anything since the last status
        self._published_at_s = 0.0
        self._published_work = False  # whether the engine had work in the last status
        self.published: Outputs | None = None  # the last status, without blocks

    def subscribe(self, gateway: bytes) -> None:
        """Send the engine's status to this gateway from now on."""
        self._gateways[gateway] = None

    def unsubscribe(self, gateway: bytes) -> None:
        self._gateways.pop(gateway, None)

    @property
    def looks_idle(self) -> bool:
        """Tell whether several gateways may take the engine for one without work, by the last status."""
        return not self._published_work and len(self._gateways) > 1

    @property
    def is_old(self) -> bool:
        return time.monotonic() - self._published_at_s >= STATS_PERIOD_S

    def send_outputs(self, outputs: Mapping[bytes, Sequence[EngineOutput]], *, lost_a_message: bool = False) -> None:
        """Send outputs by gateway, to each its own; see `Outputs`."""
        stats = self._engine.stats()
        for gateway, its_own in outputs.items():
            message = Outputs(self._engine_id, self._epoch, list(its_own), stats, lost_a_message=lost_a_message)
            self._send_apart(gateway, message)

    def send_blocks(self, gateway: bytes) -> None:
        """Send all cached blocks to one gateway, and the changes up to now to the others."""
        if (changes := self._blocks.take()) is not None:
            message = self._status(changes)
            for other in self._gateways:
                if other != gateway:
                    self._send_apart(other, message)
        self._send_apart(gateway, self._status(self._blocks.snapshot()))

    def publish(self) -> None:
        """Send the engine's status to the gateways to which it is new."""
        status, changes = self._status(), self._blocks.take() if self._gateways else None
        self._published_at_s, self._published_work = time.monotonic(), self._engine.has_work()
        is_new = status != self.published or changes is not None
        message = msgspec.structs.replace(status, blocks=changes)
        for gateway in self._gateways:
            if is_new or gateway in self._sent_apart:
                self._socket.send(gateway, message)
        self.published = status
        self._sent_apart.clear()

    def _send_apart(self, gateway: bytes, message: Outputs) -> None:
        """Send to one gateway: its status may be outdated before anything is new to all the others."""
        self._sent_apart[gateway] = None
        self._socket.send(gateway, message)

    def _status(self, blocks: BlockNews | None = None) -> Outputs:
        counters = copy.copy(self._socket.counters)  # they go on counting
        return Outputs(self._engine_id, self._epoch, [], self._engine.stats(), self._transfers(), blocks, counters)
