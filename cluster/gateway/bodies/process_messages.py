"""Messages between a gateway and a body process: one packet each, and a memory file with it.

ReaderSetup (file: the tokenizer) ──> ReadyReply
ReadOrder (file: the body) ──> RefusalReply | AnswerReply (file: JSON) | PreparedReply (file: `PreparedRequest`, tokens)
"""

from __future__ import annotations

import array
import os
import socket
from typing import Any, TypeVar

import msgspec

from ..errors import ApiError
from ..settings import GatewaySettings

PACKET_BYTES = 64 << 10
TOKEN_TYPE = "I"  # unsigned, four bytes
PACKED_TOKEN_BYTES = 4


class ReaderSetup(msgspec.Struct, frozen=True):
    """The model and the limits of a body process; the file holds the tokenizer."""

    model_id: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    generation_defaults: dict[str, float]
    memory_bytes: int  # beyond what the process uses before its first body
    timeout_s: int  # CPU time for one body


class ReadyReply(msgspec.Struct, frozen=True, tag_field="reply", tag=True):
    """The process is ready for orders."""


class ReadOrder(msgspec.Struct, frozen=True):
    """An order to read the body in the file."""

    kind: str
    key_salt: str  # separates cached prefixes of API keys; "": shared with everyone
    max_choices: int
    special_tokens_in_messages: bool

    def settings(self) -> GatewaySettings:
        """Return settings in which those that affect the reading of this body are set."""
        return GatewaySettings(max_choices=self.max_choices, special_tokens_in_messages=self.special_tokens_in_messages)


class RefusalReply(msgspec.Struct, frozen=True, tag_field="reply", tag=True):
    """An `ApiError`, as a message."""

    status: int
    message: str
    type: str
    param: str | None
    code: str | None
    headers: dict[str, str]
    detail: str

    @classmethod
    def of(cls, error: ApiError) -> RefusalReply:
        return cls(error.status, error.message, error.type, error.param, error.code, error.headers, error.detail)

    def error(self) -> ApiError:
        return ApiError(
            self.status,
            self.message,
            type=self.type,
            param=self.param,
            code=self.code,
            headers=self.headers,
            detail=self.detail,
        )


class AnswerReply(msgspec.Struct, frozen=True, tag_field="reply", tag=True):
    """A finished response, in the file."""

    num_bytes: int


class PreparedReply(msgspec.Struct, frozen=True, tag_field="reply", tag=True):
    """A prepared request. The file holds it without its token lists, then the length of each list, then all tokens.

    The lists are those of the prompts, and the prediction's at the end if there is one.
    """

    num_bytes: int  # of the `PreparedRequest`
    num_texts: int


Reply = ReadyReply | RefusalReply | AnswerReply | PreparedReply
T = TypeVar("T")


class PeerClosed(Exception):
    """The process at the other end of the socket has ended."""


def send(channel: socket.socket, message: msgspec.Struct, file: int | None = None) -> None:
    """Send a message and a file. Raises `OSError` if the other process has ended."""
    socket.send_fds(channel, [msgspec.msgpack.encode(message)], [] if file is None else [file])


def receive(channel: socket.socket, kind: Any) -> tuple[Any, int]:
    """Return a message and its file, or -1; the caller closes the file. Raises `PeerClosed`."""
    packet, files, _, _ = socket.recv_fds(channel, PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    if not packet:
        raise PeerClosed
    return msgspec.msgpack.decode(packet, type=kind), files[0] if files else -1


def read_file(file: int, num_bytes: int, start: int = 0) -> bytes:
    """Read a part of a memory file; a single read always returns all of it."""
    return os.pread(file, num_bytes, start)


def pack_tokens(tokens: list[int]) -> bytes:
    """Pack token ids in four bytes each."""
    return array.array(TOKEN_TYPE, tokens).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Unpack token ids."""
    return array.array(TOKEN_TYPE, packed).tolist()
