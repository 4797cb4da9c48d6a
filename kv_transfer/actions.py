"""What the state machines ask for. They hold no sockets and no memory: events go in, these come out."""

from __future__ import annotations

import msgspec

from baton.engine.core.connector import ConnectorEvent, TransferId

from .messages import EngineKey, FromHolder, FromReader


class SendToReader(msgspec.Struct, frozen=True):
    to: EngineKey
    message: FromHolder


class SendToHolder(msgspec.Struct, frozen=True):
    to: EngineKey
    message: FromReader


class Emit(msgspec.Struct, frozen=True):
    """Tell the engine."""

    event: ConnectorEvent


class StartRead(msgspec.Struct, frozen=True):
    """Begin to read into the blocks of a receive. Ends in `read_finished`, or in `read_failed` and `read_released`."""

    receive: TransferId


class StopRead(msgspec.Struct, frozen=True):
    """Begin nothing further for a receive; `read_released` once nothing can write any more."""

    receive: TransferId


Action = SendToReader | SendToHolder | Emit | StartRead | StopRead
