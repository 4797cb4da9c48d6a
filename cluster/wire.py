"""The messages between gateways and engines, and their encoding.

    gateway DEALER                                  engine ROUTER
      Hello(epoch)            ─────────────────>      forgets what ran for this gateway before
                              <─────────────────      Outputs([], stats, cached blocks): the connection is ready
      Submit(epoch, request)  ─────────────────>
      Begin(epoch, id, token) ─────────────────>      of a request whose blocks came while its prompt was still read
      Abort(epoch, id)        ─────────────────>
                              <─────────────────      Outputs(outputs of one step, stats)
                              <─────────────────      Outputs([], stats, changed blocks): to every gateway, now and then
      AskBlocks(epoch)        ─────────────────>      news of blocks are missing here
                              <─────────────────      Outputs([], stats, cached blocks)

Each message is one frame of msgpack; nothing else is ever decoded from these sockets. A message whose epoch is not the
engine's was meant for another process: it is counted and dropped.

Nobody waits for the answer to a message that could not be read. The engine ends the request that it names, with an
error. Where it names none the engine says `lost_a_message`, and both begin anew: with Hello, while all requests go on
elsewhere. So they do where the gateway cannot read an answer, which may have brought tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.engine.core.block_log import BlockNews
from baton.engine.core.messages import EngineOutput, EngineRequest, EngineStats
from baton.kv_transfer.protocol.stats import TransferStats

from .contracts import MessageCounters


class RequestName(msgspec.Struct, frozen=True):
    request_id: str
    generation: int = 0


class MessageHeader(msgspec.Struct, frozen=True):
    """Of any message of a gateway, as far as it can be read: for which process it is, and of which request."""

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
    """Bytes that are no message of this protocol. They came from another process: count them, never assert."""

    def __init__(self, message: str, header: MessageHeader = MessageHeader()) -> None:
        super().__init__(message)
        self.header = header


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A new conversation. Requests of this gateway that the engine still runs are aborted."""

    epoch: int


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    epoch: int
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Nobody wants this request any more, nor the blocks that it may hold for a reader. A newer generation lives on."""

    epoch: int
    request_id: str
    generation: int


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The token that a request submitted with `awaits_first_token` goes on from. One that is over ignores it."""

    epoch: int
    request_id: str
    generation: int
    token_id: int


class AskBlocks(msgspec.Struct, frozen=True, tag="ask-blocks"):
    """The gateway missed news of the prefix cache or of tiers, and wants to know all of it."""

    epoch: int


ClientMessage = Hello | Submit | Begin | Abort | AskBlocks


class Outputs(msgspec.Struct, frozen=True, tag="outputs", omit_defaults=True):
    """What one step did for one gateway's requests (nothing: only news about the engine)."""

    engine_id: str
    epoch: int
    outputs: list[EngineOutput]
    stats: EngineStats
    transfers: TransferStats | None = None  # with news about the engine, where it hands KV over
    blocks: BlockNews | None = None  # with news about the engine, where its prefix cache or its tiers changed
    mail: MessageCounters | None = None  # with news about the engine
    lost_a_message: bool = False  # of this gateway, nobody knows about what: the conversation is over


class Codec:
    """Encoder and decoders of one thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._from_client = msgspec.msgpack.Decoder(ClientMessage)
        self._header = msgspec.msgpack.Decoder(MessageHeader)
        self._from_engine = msgspec.msgpack.Decoder(Outputs)

    def encode(self, message: ClientMessage | Outputs) -> bytes:
        return self._encoder.encode(message)

    def decode_from_client(self, frame: bytes) -> ClientMessage:
        """Raises `WireError`."""
        try:
            return self._decode(self._from_client, frame)
        except WireError as error:
            raise WireError(str(error), self._read_header(frame)) from error

    def decode_from_engine(self, frame: bytes) -> Outputs:
        """Raises `WireError`."""
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
