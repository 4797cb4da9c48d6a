"""Converts single tokens to bytes, for tokenizers whose decoder only concatenates.

With most decoders, each token stands for the same bytes whatever its neighbours are, and the text is their
concatenation, decoded as UTF-8. There are two families:

    byte level      "Ġhé" ............ each character stands for one byte (GPT-2, Llama 3, Qwen)
    sentence piece  "▁h", "<0xC3>" ... "▁" stands for a space; text without tokens is bytes (Llama 2, Mistral)

The second family drops the space before the first word of a text.
"""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class LeadingSpace(enum.Enum):
    """Treatment of spaces at the beginning of a text."""

    KEEP = "keep"
    DROP_ONE = "drop one"
    DROP_IN_FIRST_TOKEN = "drop all of the first token"


@dataclass(frozen=True, slots=True)
class ByteDecoder:
    """Converts a token to its bytes, as the tokenizer's concatenating decoder does."""

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_pieces: bool = False
    leading_space: LeadingSpace = LeadingSpace.KEEP

    def first_to_bytes(self, token: str) -> bytes:
        """Return the bytes of a token that begins a text."""
        if self.leading_space is LeadingSpace.DROP_IN_FIRST_TOKEN:
            for mark, _ in self.replacements:
                token = token.replace(mark, "")
        piece = self.to_bytes(token)
        return piece.removeprefix(b" ") if self.leading_space is LeadingSpace.DROP_ONE else piece

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # added tokens stand for their own text
                return token.encode()
        for mark, text in self.replacements:
            token = token.replace(mark, text)
        byte = _BYTE_PIECE.fullmatch(token) if self.byte_pieces else None
        return bytes([int(byte[1], 16)]) if byte else token.encode()


def byte_decoder_of(backend: Backend) -> ByteDecoder | None:
    """Return the byte decoder of a tokenizer, or None if its decoder looks at several tokens together."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return _read_steps(steps)


def _read_steps(steps: list[dict[str, Any]]) -> ByteDecoder | None:
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteDecoder(byte_level=True)
    if kinds == ["Metaspace"]:
        drops = steps[0].get("prepend_scheme", "always") != "never"
        leading = LeadingSpace.DROP_IN_FIRST_TOKEN if drops else LeadingSpace.KEEP
        return ByteDecoder(replacements=((steps[0]["replacement"], " "),), leading_space=leading)
    replacements, leading = [], LeadingSpace.KEEP
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": mark}, "content": text}:
                replacements.append((mark, text))
            case {"type": "Strip", "content": " ", "start": 0 | 1 as count, "stop": 0}:
                leading = LeadingSpace.DROP_ONE if count else LeadingSpace.KEEP
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                return None
    # Without Fuse, Strip would apply to every token rather than to the text.
    if leading is LeadingSpace.DROP_ONE and kinds[-2:] != ["Fuse", "Strip"]:
        return None
    return ByteDecoder(replacements=tuple(replacements), byte_pieces="ByteFallback" in kinds, leading_space=leading)


def _bytes_of_characters() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for characters from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_of_characters()
