"""The messages between gateways and engines, and their encoding.

    gateway DEALER                                  engine ROUTER
      Hello(epoch)            ─────────────────>      aborts this gateway's earlier requests
                              <─────────────────      Status(stats, cached blocks): the connection is ready
      Submit(epoch, request)  ─────────────────>      with the longest queue that may accept the request
      Begin(epoch, id, token) ─────────────────>      first token of a request whose blocks arrived before
      Abort(epoch, id)        ─────────────────>
                              <─────────────────      Outputs(outputs of one step)
                              <─────────────────      Status(stats, changed blocks): to every gateway, periodically
      AskBlocks(epoch)        ─────────────────>      the gateway has missed changes of blocks
                              <─────────────────      Status(stats, cached blocks)

Each message is one frame of msgpack; nothing else is decoded from these sockets. A message whose epoch is not the
engine's was meant for another process: it is counted and dropped.

No side waits in vain if a message cannot be decoded. The engine ends the request that the message names, with an error.
If it names none, the engine sends `lost_a_message`; then the gateway opens a new connection with Hello, and its
requests continue elsewhere. The gateway does the same if it cannot decode an engine's message, which may have contained
tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.engine.core.block_log import BlockUpdate
from baton.engine.core.messages import EngineOutput, EngineRequest, EngineStats
from baton.kv_transfer.protocol.stats import TransferStats

from .contracts import QueueBound


class RequestName(msgspec.Struct, frozen=True):
    request_id: str
    generation: int = 0


class MessageHeader(msgspec.Struct, frozen=True):
    """The fields that identify the process and request of a gateway's message that cannot be decoded as a whole."""

    epoch: int | None = None
    request: RequestName | None = None
    request_id: str | None = None
    generation: int = 0

    @property
    def name(self) -> RequestName | None:
        if self.request is not None or self.request_id is None:
            return self.request
        return RequestName(self.request_id, self.generation)


class WireError(ValueError):
    """Bytes that are no message of this protocol. They come from another process, so count them and never assert."""

    def __init__(self, message: str, header: MessageHeader = MessageHeader()) -> None:
        super().__init__(message)
        self.header = header


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Opens a connection. The engine aborts earlier requests of this gateway."""

    epoch: int


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    epoch: int
    request: EngineRequest
    queue: QueueBound | None = None  # an engine with a longer queue refuses the request; None: no limit


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Ends a request, and releases blocks that it holds for a reader. A newer generation of it is left alone."""

    epoch: int
    request_id: str
    generation: int


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Brings the first token of a request that was submitted with `awaits_first_token` and is not over."""

    epoch: int
    request_id: str
    generation: int
    token_id: int


class AskBlocks(msgspec.Struct, frozen=True, tag="ask-blocks"):
    """Asks for all cached blocks, because the gateway has missed a change of the prefix cache or the tiers."""

    epoch: int


ClientMessage = Hello | Submit | Begin | Abort | AskBlocks


class Outputs(msgspec.Struct, frozen=True, tag="outputs", omit_defaults=True):
    """The outputs of one step for one gateway."""

    epoch: int
    outputs: list[EngineOutput]
    lost_a_message: bool = False  # a message of this gateway that named no request was lost: the connection is over


class Status(msgspec.Struct, frozen=True, tag="status", omit_defaults=True):
    """The state of the engine, for routers and `baton status`."""

    epoch: int
    stats: EngineStats
    transfers: TransferStats | None = None  # if the engine hands KV over
    blocks: BlockUpdate | None = None  # if the prefix cache or the tiers have changed


EngineMessage = Outputs | Status


class Codec:
    """The encoder and decoders of one thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._from_client = msgspec.msgpack.Decoder(ClientMessage)
        self._header = msgspec.msgpack.Decoder(MessageHeader)
        self._from_engine = msgspec.msgpack.Decoder(EngineMessage)

    def encode(self, message: ClientMessage | EngineMessage) -> bytes:
        return self._encoder.encode(message)

    def decode_from_client(self, frame: bytes) -> ClientMessage:
        """Decode a gateway's message. Raises `WireError`."""
        try:
            return self._decode(self._from_client, frame)
        except WireError as error:
            raise WireError(str(error), self._read_header(frame)) from error

    def decode_from_engine(self, frame: bytes) -> EngineMessage:
        """Decode an engine's message. Raises `WireError`."""
        return self._decode(self._from_engine, frame)

    def _read_header(self, frame: bytes) -> MessageHeader:
        try:
            return self._decode(self._header, frame)
        except WireError:
            return MessageHeader()

    @staticmethod
    def _decode(decoder: msgspec.msgpack.Decoder, frame: bytes) -> Any:
        try:
            return decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"not a message of this protocol: {error}") from error
