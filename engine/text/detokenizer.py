"""Incremental detokenization: text from token ids that arrive a few at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from .byte_decoder import ByteDecoder
from .tokenizer import Tokenizer

LONGEST_CHARACTER = 4  # bytes of UTF-8
CONTEXT_TOKENS = 6  # tokens of preceding text that are decoded again, for decoders that look at neighbours
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """Turns one output's token ids into text as they arrive.

    The deltas and the final `flush` add up to the text of all tokens decoded at once. A character whose bytes are
    spread over several tokens is returned whole, with its last byte. The output continues the text of
    `prompt_token_ids`: its first word keeps the space before it, and a character that the prompt began is completed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`shown` are special tokens whose text is kept in any case."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids - shown if skip_special_tokens else frozenset[int]()
        context = _last(prompt_token_ids, self._skipped, CONTEXT_TOKENS)
        rule = tokenizer.byte_decoder
        self._stream: _Stream = (
            _WindowStream(tokenizer, context) if rule is None else _ByteStream(tokenizer, rule, context)
        )
        self._length = 0

    def offset_of(self, token_id: int) -> int:
        """Return the offset at which the text of this token will begin if it is pushed next, in characters.

        A token that goes on with an incomplete character begins where that begins. If it does not go on with it, it
        begins behind the U+FFFD for the incomplete one.
        """
        return self._length + (0 if token_id in self._skipped else self._stream.num_before(token_id))

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens add, without a character that is still incomplete."""
        text = "".join(self._stream.push(token) for token in token_ids if token not in self._skipped)
        self._length += len(text)
        return text

    def flush(self) -> str:
        """Return the rest of the text at the end: U+FFFD for bytes of an incomplete character."""
        return self._stream.flush()


class _Stream(Protocol):
    def num_before(self, token_id: int) -> int:
        """Return how many characters of the text that `push` would return belong to earlier tokens."""
        ...

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteStream:
    """Detokenizes with a concatenating decoder: tokens' bytes go through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, rule: ByteDecoder, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._rule = rule
        self._begins = not context
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = b"".join(tokenizer.token_bytes(token) for token in context)
        self._utf8.decode(tail[_last_character(tail) :])

    def num_before(self, token_id: int) -> int:
        incomplete, _ = self._utf8.getstate()
        first = self._tokenizer.token_bytes(token_id)[:1]
        return 1 if incomplete and first and not _goes_on(incomplete, first) else 0

    def push(self, token_id: int) -> str:
        piece = self._tokenizer.token_bytes(token_id)
        if self._begins and piece:
            self._begins = False
            piece = self._rule.first_to_bytes(self._tokenizer.token(token_id) or "")
        return self._utf8.decode(piece)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """Detokenizes with any other decoder: decodes the last tokens again, and returns the text that is new."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(context)
        self._given = len(self._decode(self._window))
        self._settled = len(self._window)  # number of tokens in the window whose text has been returned

    def num_before(self, token_id: int) -> int:
        if self._settled == len(self._window):
            return 0
        before, after = self._decode(self._window), self._decode([*self._window, token_id])
        is_incomplete = after.endswith(_REPLACEMENT)  # then the token may go on with the incomplete character
        return len(before) - self._given if after.startswith(before) and not is_incomplete else 0

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return ""
        return self._give(text)

    def flush(self) -> str:
        return self._give(self._decode(self._window))

    def _give(self, text: str) -> str:
        delta = text[self._given :]
        # Tokens whose text has been returned only serve as context: keep the last few.
        self._window = self._window[max(0, self._settled - CONTEXT_TOKENS) :]
        self._settled = len(self._window)
        self._given = len(self._decode(self._window))
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _last(token_ids: Sequence[int], skipped: frozenset[int], count: int) -> list[int]:
    """Return the last `count` tokens that are not skipped, in order."""
    found: list[int] = []
    for token in reversed(token_ids):
        if len(found) == count:
            break
        if token not in skipped:
            found.append(token)
    return found[::-1]


def _goes_on(incomplete: bytes, byte: bytes) -> bool:
    """Return whether a byte is a part of the character whose beginning is `incomplete`."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(incomplete + byte)
    except UnicodeDecodeError:
        return False
    return True


def _last_character(data: bytes) -> int:
    """Return the offset of the last character of `data`, which may be incomplete."""
    for start in range(len(data) - 1, max(-1, len(data) - 1 - LONGEST_CHARACTER), -1):
        if data[start] & 0xC0 != 0x80:
            return start
    return len(data)
