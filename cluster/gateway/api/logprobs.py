"""Log probabilities in the three formats of the API: legacy completions, chat, and vLLM's for prompts.

They are written as pieces of JSON: for each piece, a few positions are unpacked and freed again. If a whole answer were
held as objects, encoding, freeing or garbage-collecting them would block the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from baton.engine.core.logprobs import Logprobs, TokenLogprobs
from baton.engine.text import IncrementalDetokenizer, Tokenizer

from .detokenize import LocatedToken
from .renderer import HOLE, VALUES_AT_ONCE, Pieces, encode, fill

LOWEST = -9999.0  # JSON has no minus infinity; this is what other servers write
POSITION_COST = 4  # of a position beside its values, expressed in values


class Position(NamedTuple):
    """A token, its offset in the text, and its log probabilities; None for a prompt's first token."""

    offset: int
    token_id: int
    entry: TokenLogprobs | None


class CompletionLogprobs(msgspec.Struct):
    """Four lists with an entry for each token."""

    tokens: msgspec.Raw = HOLE
    token_logprobs: msgspec.Raw = HOLE
    top_logprobs: msgspec.Raw = HOLE
    text_offset: msgspec.Raw = HOLE


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: msgspec.Raw = HOLE  # a list of `ChatTokenLogprob`
    refusal: None = None


class StreamedTop(msgspec.Struct):
    token: str
    logprob: float


class StreamedLogprob(msgspec.Struct):
    """A token's log probability in a streamed event of a response; it lacks the `bytes` that whole responses have."""

    token: str
    logprob: float
    top_logprobs: list[StreamedTop]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


def num_logprobs(tokens: Sequence[LocatedToken]) -> int:
    """Return the number of log probabilities; all tokens of one answer have equally many."""
    return len(tokens) * tokens[0].logprobs.width if tokens else 0


def completion_logprobs(tokenizer: Tokenizer, groups: Iterable[list[Position]]) -> Pieces:
    """Write the format of completions. Its four lists follow one another, so they are all computed before."""
    columns: list[list[bytes]] = [[], [], [], []]
    for group in groups:
        for column, items in zip(columns, _completion_columns(tokenizer, group), strict=True):
            column.append(encode(items)[1:-1])
        yield b""
    yield from fill(CompletionLogprobs(), [_bracketed(column) for column in columns])


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[LocatedToken]) -> Pieces:
    """Write the format of chat completions."""
    return fill(ChatLogprobs(), [chat_tokens(tokenizer, tokens)])


def chat_tokens(tokenizer: Tokenizer, tokens: Sequence[LocatedToken]) -> Pieces:
    """Write a list of `ChatTokenLogprob`."""

    def top(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(tokenizer.token_text(token_id), max(logprob, LOWEST), list(tokenizer.token_bytes(token_id)))

    def item(entry: TokenLogprobs) -> ChatTokenLogprob:
        own, *tops = map(top, entry.token_ids, entry.logprobs)
        return ChatTokenLogprob(own.token, own.logprob, own.bytes, tops)

    return _list_of(item, tokens)


def streamed_tokens(tokenizer: Tokenizer, tokens: Sequence[LocatedToken]) -> Pieces:
    """Write a list of `StreamedLogprob`."""

    def item(entry: TokenLogprobs) -> StreamedLogprob:
        names, values = map(tokenizer.token_text, entry.token_ids), (max(each, LOWEST) for each in entry.logprobs)
        own, *tops = map(StreamedTop, names, values)
        return StreamedLogprob(own.token, own.logprob, tops)

    return _list_of(item, tokens)


def prompt_logprobs(tokenizer: Tokenizer, logprobs: Logprobs) -> Pieces:
    """Write vLLM's format: for each prompt token after the first, its own entry and the likeliest ones by token id."""
    groups = ([_by_token(tokenizer, entry) for entry in group] for group in _groups_of(logprobs))
    first: list[list[Any]] = [[None]]
    return _bracketed(encode(group)[1:-1] for group in chain(first, groups))


def answer_positions(tokens: Sequence[LocatedToken], offset: int) -> Iterator[list[Position]]:
    """Yield generated tokens in groups. `offset` is the length of an echoed prompt, in characters."""
    for group in _groups(tokens):
        entries = [token.logprobs[0] for token in group]
        yield [
            Position(offset + token.offset, entry.token_ids[0], entry)
            for token, entry in zip(group, entries, strict=True)
        ]


def prompt_positions(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Logprobs, text: str
) -> Iterator[list[Position]]:
    """Yield the tokens of a prompt that is echoed as `text`, in groups."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)

    def position(token_id: int, entry: TokenLogprobs | None) -> Position:
        offset = detokenizer.offset_of(token_id)
        is_framing = token_id in tokenizer.special_token_ids  # added around the text by the tokenizer
        if not is_framing or text.startswith(tokenizer.token_text(token_id), offset):
            detokenizer.push([token_id])
        return Position(offset, token_id, entry)

    if len(logprobs) != len(prompt) - 1:
        raise ValueError("log probabilities of another prompt")
    yield [position(prompt[0], None)]
    rest = iter(prompt[1:])
    for group in _groups_of(logprobs):
        yield [position(next(rest), entry) for entry in group]


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a distinct key for each token: incomplete characters are written as OpenAI does, `bytes:\\xe2\\x80`."""
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _completion_columns(tokenizer: Tokenizer, group: list[Position]) -> tuple[list[Any], ...]:
    """Return a group's part of each of the four lists."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for _, token_id, entry in group:
        if entry is None:
            tokens.append(token_name(tokenizer, token_id))
            values.append(None)
            tops.append(None)
            continue
        names = [token_name(tokenizer, each) for each in entry.token_ids]
        logprobs = [max(logprob, LOWEST) for logprob in entry.logprobs]
        tokens.append(names[0])
        values.append(logprobs[0])
        tops.append(dict(zip(names, logprobs, strict=True)))
    return tokens, values, tops, [position.offset for position in group]


def _by_token(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
    ranks = (entry.rank, *range(1, len(entry.token_ids)))
    by_token: dict[str, PromptLogprob] = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
        value = PromptLogprob(max(logprob, LOWEST), rank, tokenizer.token_text(token_id))
        by_token.setdefault(str(token_id), value)
    return by_token


def _list_of(item: Callable[[TokenLogprobs], msgspec.Struct], tokens: Sequence[LocatedToken]) -> Pieces:
    """Write a list with an item for each token."""
    return _bracketed(encode([item(token.logprobs[0]) for token in group])[1:-1] for group in _groups(tokens))


def _bracketed(pieces: Iterable[bytes]) -> Pieces:
    """Write a list whose items are encoded in groups, none of which is empty."""
    before = b"["
    for piece in pieces:
        yield before + piece
        before = b","
    yield b"]" if before == b"," else b"[]"


def _groups(tokens: Sequence[LocatedToken]) -> Iterator[Sequence[LocatedToken]]:
    count = _positions_at_once(tokens[0].logprobs.width) if tokens else 1
    for start in range(0, len(tokens), count):
        yield tokens[start : start + count]


def _groups_of(logprobs: Logprobs) -> Iterator[Iterator[TokenLogprobs]]:
    count = _positions_at_once(logprobs.width)
    for start in range(0, len(logprobs), count):
        yield logprobs.entries(start, min(start + count, len(logprobs)))


def _positions_at_once(width: int) -> int:
    return max(1, VALUES_AT_ONCE // (width + POSITION_COST))
