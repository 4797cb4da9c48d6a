"""Parts that all responses share: token usage, server-sent events, and the joining of a choice's deltas.

A short text is bytes; a long one is an iterator of pieces, each of which takes little work when it is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from baton.engine.core.speculation.stats import NO_DRAFTS

from ..errors import ApiError
from ..serving.timeline import TimelineReport
from .detokenize import ChoiceDelta
from .job import GenerationJob

DONE = b"data: [DONE]\n\n"

VALUES_AT_ONCE = 512  # log probabilities to be written before other tasks run: takes about a millisecond
TOKENS_AT_ONCE = 64  # of a whole answer, to be parsed before other tasks run: takes about a millisecond
HOLE = msgspec.Raw(b"\xff")  # placeholder for pieces of JSON, which never contain this byte

Pieces = Iterator[bytes]
Text = bytes | Pieces

encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Counts of draft tokens that came from the request's `prediction`."""

    accepted_prediction_tokens: int  # in the answer
    rejected_prediction_tokens: int  # not in the answer, and not in `completion_tokens`


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # with `prediction`


class Renderer(Protocol):
    """Writes one response as JSON. Call either `event` for each delta and then `end`, or `whole`."""

    @property
    def needs_each_delta(self) -> bool:
        """True if `whole` counts the tokens of parts of a text: it needs deltas as they came, or log probabilities."""
        ...

    def event(self, index: int, delta: ChoiceDelta, event_id: bytes = b"") -> Text:
        """Return the server-sent events of a choice's delta; empty if clients see no change.

        The last event carries `event_id`, if there is one.
        """
        ...

    def end(self) -> Text: ...

    def failed(self, error: ApiError) -> Text:
        """Return the last event, in place of `end`, of a stream that failed."""
        ...

    def whole(self, choices: Sequence[Sequence[ChoiceDelta]]) -> Text: ...


class UsageCounter:
    """Counts a response's tokens. A prompt with several choices counts once."""

    def __init__(self, job: GenerationJob) -> None:
        self._options = job.prepared.usage
        self._n = job.prepared.sampling.n
        self._prompt_tokens = job.prepared.num_tokens
        self._cached_tokens = 0
        self._completion_tokens = 0
        self._has_prediction = job.prepared.prediction is not None
        self._drafts = NO_DRAFTS
        self._timelines: dict[int, TimelineReport] = {}  # by choice

    def add(self, index: int, delta: ChoiceDelta) -> None:
        self._completion_tokens += delta.num_tokens
        if delta.drafts is not NO_DRAFTS:
            self._drafts += delta.drafts
        if index % self._n == 0:
            self._cached_tokens += delta.num_cached_tokens
        if delta.timeline is not None:
            self._timelines[index] = delta.timeline

    def usage(self) -> Usage:
        usage = Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(self._cached_tokens),
        )
        if self._has_prediction:
            usage.completion_tokens_details = CompletionTokensDetails(
                self._drafts.num_accepted_predicted_tokens, self._drafts.num_rejected_predicted_tokens
            )
        return usage

    def timelines(self) -> list[TimelineReport] | UnsetType:
        """Return the requested timelines, in the order of the choices."""
        return [self._timelines[index] for index in sorted(self._timelines)] or UNSET

    def in_chunk(self) -> Usage | UnsetType | None:
        """Return a chunk's `usage`: null if usage comes at the end of the stream, unset if it was not requested."""
        if self._options.in_each_chunk:
            return self.usage()
        return None if self._options.at_end else UNSET

    def at_end(self) -> tuple[Usage | UnsetType, list[TimelineReport] | UnsetType] | None:
        """Return usage and timelines for an additional last chunk without choices; None if neither was requested."""
        timelines = self.timelines()
        if not self._options.at_end and timelines is UNSET:
            return None
        return self.usage() if self._options.at_end else UNSET, timelines


def sse(chunk: msgspec.Struct, event_id: bytes = b"") -> bytes:
    name = b"id: " + event_id + b"\n" if event_id else b""
    return name + b"data: " + encode(chunk) + b"\n\n"


def sse_filled(chunk: msgspec.Struct, event_id: bytes, parts: Sequence[Iterable[bytes]], num_values: int) -> Text:
    """Return an event whose holes are filled with log probabilities."""
    name = b"id: " + event_id + b"\n" if event_id else b""
    return at_once(chain([name + b"data: "], fill(chunk, parts), [b"\n\n"]), num_values)


def fill(skeleton: object, parts: Sequence[Iterable[bytes]]) -> Pieces:
    """Return the JSON of `skeleton` as it is now, with the pieces of each part in place of a `HOLE`, in order."""
    first, *rest = encode(skeleton).split(bytes(HOLE))
    return chain([first], *(chain(part, [after]) for part, after in zip(parts, rest, strict=True)))


def at_once(pieces: Pieces, num_values: int) -> Text:
    """Join the pieces now if they have few log probabilities."""
    return b"".join(pieces) if num_values <= VALUES_AT_ONCE else pieces


def read_in_turns(read: Callable[[ChoiceDelta], object], deltas: Iterable[ChoiceDelta]) -> Pieces:
    """Read the deltas of a whole answer. Each empty piece lets other tasks run."""
    num_tokens = 0
    for delta in deltas:
        read(delta)
        num_tokens += delta.num_tokens
        if num_tokens >= TOKENS_AT_ONCE:
            num_tokens = 0
            yield b""


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


def join(deltas: Iterable[ChoiceDelta]) -> ChoiceDelta:
    """Join the deltas of a choice."""
    deltas = list(deltas)
    first, last = deltas[0], deltas[-1]
    return ChoiceDelta(
        text="".join(delta.text for delta in deltas),
        tokens=[token for delta in deltas for token in delta.tokens],
        token_ids=[token for delta in deltas for token in delta.token_ids],
        num_tokens=sum(delta.num_tokens for delta in deltas),
        drafts=sum((delta.drafts for delta in deltas if delta.drafts is not NO_DRAFTS), NO_DRAFTS),
        num_cached_tokens=first.num_cached_tokens,
        prompt_logprobs=first.prompt_logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        timeline=last.timeline,
    )
