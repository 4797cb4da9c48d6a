"""Messages from an engine to its gateways: the outputs of their requests, and the engine's status.

    outputs of a step    to the gateways that asked for them
    the engine's status  to all gateways that said hello: when work arrives, every `STATUS_PERIOD_S`, when work is done
    cached blocks        all of them to a gateway that says hello or asks; changes to all gateways, with the status

A status that is equal to the previous one is not sent again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from baton.cluster.wire import Outputs, Status
from baton.engine.core.block_log import BlockLog
from baton.engine.core.messages import EngineOutput, EngineStats
from baton.kv_transfer.protocol.stats import TransferStats

from .engine_socket import EngineSocket

STATUS_PERIOD_S = 0.05  # a status after every step would not improve routing (docs/benchmarks/simulations.md)


class StatusSource(Protocol):
    """The engine whose status is published."""

    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def block_log(self) -> BlockLog: ...


class StatusPublisher:
    """Sends outputs and status to gateways. One thread uses it; any thread may read `published`."""

    def __init__(
        self, socket: EngineSocket, engine: StatusSource, epoch: int, transfers: Callable[[], TransferStats | None]
    ) -> None:
        """`transfers()` returns the statistics of transfers, which are sent along with the engine's."""
        self._socket = socket
        self._engine = engine
        self._epoch = epoch
        self._transfers = transfers
        self._blocks = engine.block_log()
        self._gateways: dict[bytes, None] = {}  # subscribers, in the order of subscription
        self._published_at_s = 0.0
        self._published_work = False  # whether the engine had work according to the last status
        self.published: Status | None = None  # the last status, without its blocks

    def subscribe(self, gateway: bytes) -> None:
        """Send the engine's status to this gateway from now on."""
        self._gateways[gateway] = None

    def unsubscribe(self, gateway: bytes) -> None:
        self._gateways.pop(gateway, None)

    @property
    def looks_idle(self) -> bool:
        """Return whether the last status showed several gateways an idle engine, to which all may send requests now."""
        return not self._published_work and len(self._gateways) > 1

    @property
    def is_old(self) -> bool:
        return time.monotonic() - self._published_at_s >= STATUS_PERIOD_S

    def send_outputs(self, outputs: Mapping[bytes, Sequence[EngineOutput]], *, lost_a_message: bool = False) -> None:
        """Send each gateway its own outputs; see `Outputs`."""
        for gateway, its_own in outputs.items():
            self._socket.send(gateway, Outputs(self._epoch, list(its_own), lost_a_message))

    def publish(self, newcomer: bytes | None = None) -> None:
        """Send the engine's status to all gateways if it has changed.

        `newcomer` gets it in any case, with all cached blocks; the others get the changes since the last status.
        """
        if newcomer is not None:
            self.subscribe(newcomer)
        changes = self._blocks.take() if self._gateways else None
        status = Status(self._epoch, self._engine.stats(), self._transfers())
        is_new = status != self.published or changes is not None
        self.published, self._published_work = status, self._engine.has_work()
        self._published_at_s = time.monotonic()
        for gateway in self._gateways:
            if gateway == newcomer:
                self._socket.send(gateway, msgspec.structs.replace(status, blocks=self._blocks.snapshot()))
            elif is_new:
                self._socket.send(gateway, msgspec.structs.replace(status, blocks=changes))
