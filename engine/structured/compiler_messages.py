"""Messages between an engine and its grammar compiler: length-prefixed msgpack through pipes.

CompilerSetup ──> CompilerReady | RefusedReply          once
StructuredOutputsParams ──> CompiledReply | RefusedReply          one at a time
"""

from __future__ import annotations

from typing import IO

import msgspec

_LENGTH_BYTES = 8


class GrammarVocabulary(msgspec.Struct, frozen=True):
    """The vocabulary that grammars constrain."""

    tokenizer: str  # the tokenizer's folder
    vocab_size: int  # size of the model's output layer
    eos_token_ids: list[int]


class CompileLimits(msgspec.Struct, frozen=True):
    """Limits for compiling one grammar."""

    compile_s: int = 30
    memory_bytes: int = 2 << 30  # in addition to what the process uses before its first grammar


class CompilerSetup(msgspec.Struct, frozen=True):
    vocabulary: GrammarVocabulary
    limits: CompileLimits


class CompilerReady(msgspec.Struct, frozen=True, tag=True):
    tokenizer_info: str  # xgrammar's, serialized


class CompiledReply(msgspec.Struct, frozen=True, tag=True):
    grammar: str  # xgrammar's compiled grammar, serialized


class RefusedReply(msgspec.Struct, frozen=True, tag=True):
    """A `GrammarRefused` as a message."""

    reason: str
    place: str = ""
    detail: str = ""  # for the log


def write_frame(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Write a message. Raises `OSError` if the other process has ended."""
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(_LENGTH_BYTES, "little"))
    stream.write(body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the next message's bytes; None if the other process has ended."""
    head = stream.read(_LENGTH_BYTES)
    length = int.from_bytes(head, "little")
    body = stream.read(length) if len(head) == _LENGTH_BYTES else b""
    return body if body and len(body) == length else None
