"""What the gateways of an engine are told: the outputs of their requests, and how the engine does.

    outputs of a step   to the gateways that asked for them
    the engine's state  to all that said hello: when work comes, every `STATS_PERIOD_S` of it, and when it is done
    cached blocks       all of them to who greets or asks; what changed since to everyone, with the state

What is the same as before is not told again.
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

from .mailbox import Mailbox

STATS_PERIOD_S = 0.25  # a busy engine tells its state also to gateways that have no request in it


class Reported(Protocol):
    """What is told of."""

    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def block_log(self) -> BlockLog: ...


class News:
    """One thread uses it; any may look at `told`."""

    def __init__(
        self,
        mail: Mailbox,
        engine: Reported,
        engine_id: str,
        epoch: int,
        transfers: Callable[[], TransferStats | None],
    ) -> None:
        """Gateways are told `transfers()` along with the engine's statistics."""
        self._mail = mail
        self._engine = engine
        self._engine_id, self._epoch = engine_id, epoch
        self._transfers = transfers
        self._blocks = engine.block_log()
        self._gateways: dict[bytes, None] = {}  # those that hear of the engine, in order
        self._told_apart: dict[bytes, None] = {}  # those that were told something else since
        self._told_at_s = 0.0
        self._told_of_work = False  # in what every gateway knows
        self.told: Outputs | None = None  # to every gateway, last; but for blocks

    def hears(self, gateway: bytes) -> None:
        """From now on."""
        self._gateways[gateway] = None

    def is_gone(self, gateway: bytes) -> None:
        self._gateways.pop(gateway, None)

    @property
    def says_idle(self) -> bool:
        """Several gateways may take the engine for one without work, as far as they were told."""
        return not self._told_of_work and len(self._gateways) > 1

    @property
    def is_old(self) -> bool:
        return time.monotonic() - self._told_at_s >= STATS_PERIOD_S

    def tell(self, gateway: bytes, outputs: Sequence[EngineOutput], *, lost_a_message: bool = False) -> None:
        """To one gateway; see `Outputs`."""
        self.tell_each({gateway: outputs}, lost_a_message=lost_a_message)

    def tell_each(self, outputs: Mapping[bytes, Sequence[EngineOutput]], *, lost_a_message: bool = False) -> None:
        """To each gateway its own."""
        stats = self._engine.stats()
        for gateway, its_own in outputs.items():
            message = Outputs(self._engine_id, self._epoch, list(its_own), stats, lost_a_message=lost_a_message)
            self._tell_apart(gateway, message)

    def tell_blocks(self, gateway: bytes) -> None:
        """All that is cached, to one gateway; what changed until now, to the others."""
        if (changes := self._blocks.take()) is not None:
            told = self._news(changes)
            for other in self._gateways:
                if other != gateway:
                    self._tell_apart(other, told)
        self._tell_apart(gateway, self._news(self._blocks.snapshot()))

    def tell_all(self) -> None:
        """How the engine does, where that is new to them."""
        news, changes = self._news(), self._blocks.take() if self._gateways else None
        self._told_at_s, self._told_of_work = time.monotonic(), self._engine.has_work()
        is_new = news != self.told or changes is not None
        told = msgspec.structs.replace(news, blocks=changes)
        for gateway in self._gateways:
            if is_new or gateway in self._told_apart:
                self._mail.send(gateway, told)
        self.told = news
        self._told_apart.clear()

    def _tell_apart(self, gateway: bytes, message: Outputs) -> None:
        """What it hears of the engine may be over before anything is new to all the others."""
        self._told_apart[gateway] = None
        self._mail.send(gateway, message)

    def _news(self, blocks: BlockNews | None = None) -> Outputs:
        mail = copy.copy(self._mail.counters)  # which goes on counting
        return Outputs(self._engine_id, self._epoch, [], self._engine.stats(), self._transfers(), blocks, mail)
