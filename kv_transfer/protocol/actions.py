"""Actions: the outputs of the state machines, which have no sockets and no memory themselves."""

from __future__ import annotations

import msgspec

from baton.engine.core.connector import ConnectorEvent, TransferId

from .messages import Digests, EngineKey, FromHolder, FromReader


class SendToReader(msgspec.Struct, frozen=True):
    to: EngineKey
    message: FromHolder


class SendToHolder(msgspec.Struct, frozen=True):
    to: EngineKey
    message: FromReader


class Emit(msgspec.Struct, frozen=True):
    """Pass an event to the engine."""

    event: ConnectorEvent


class ReadBlocks(msgspec.Struct, frozen=True):
    """Read blocks [start, stop) of a receive, the next ones; the first such action begins its read.

    It ends in `read_finished` when all of the receive's blocks are there, or in `read_failed` and `read_released`.
    """

    receive: TransferId
    start: int
    stop: int


class StopReading(msgspec.Struct, frozen=True):
    """Begin no further read for a receive; `read_released` follows once nothing can write any more."""

    receive: TransferId


class CompareDigests(msgspec.Struct, frozen=True):
    """Compare some of what was read with the holder's digests. Ends in `matched` or `corrupt`."""

    receive: TransferId
    digests: Digests


Action = SendToReader | SendToHolder | Emit | ReadBlocks | StopReading | CompareDigests
