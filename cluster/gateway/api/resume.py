"""A stream whose gateway died goes on at another one, which has never heard of it.

    POST {..., "stream": true, "stream_options": {"resumable": true}}    ──> each event says `id: POSITION`
    the connection breaks
    the same POST to any gateway, with `last-event-id: POSITION`         ──> the events behind that one

A position holds the seed, and how many tokens of each choice were told. Random draws depend on seed and position only:
the tokens so far are generated once more, and are not told again. Their checksum is in the position, too. Where other
tokens come, as from engines that round otherwise, the answer is a 409 before anything is told, and the client had best
ask anew. Nothing is kept in a gateway, an engine or the cluster for streams that might break.
"""

from __future__ import annotations

import base64
from typing import Annotated, Self

import msgspec

from baton.engine.core.messages import EngineOutput
from baton.engine.core.sampling import SEED_BITS

from ..errors import ApiError, bad_request
from .detokenize import ChoiceDelta, ChoicePosition
from .job import GenerationJob
from .renderer import Renderer

LAST_EVENT_ID_HEADER = "last-event-id"
VERSION = "1."  # of what follows in an id
MAX_ID_CHARS = 64 << 10

Count = Annotated[int, msgspec.Meta(ge=0)]


class StreamPosition(msgspec.Struct, frozen=True, array_like=True):
    """In a stream: behind one of its events."""

    request_id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]  # the chunks' ids are made of it
    created: Count
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**SEED_BITS - 1)]
    marks: tuple[ChoicePosition, ...]  # of the choices

    @classmethod
    def from_event_id(cls, event_id: str | None, *, is_resumable: bool) -> Self | None:
        """What the client has already; None where it begins. Raises `ApiError` (400) for what is no position."""
        if event_id is None:
            return None
        if not is_resumable:
            message = f"{LAST_EVENT_ID_HEADER!r} is for requests with 'stream' and 'stream_options.resumable'."
            raise bad_request(LAST_EVENT_ID_HEADER, message, "not_resumable")
        try:
            if not event_id.startswith(VERSION) or len(event_id) > MAX_ID_CHARS:
                raise ValueError
            return msgspec.msgpack.decode(base64.b64decode(event_id[len(VERSION) :], b"-_", validate=True), type=cls)
        except (ValueError, msgspec.MsgspecError):
            message = f"{LAST_EVENT_ID_HEADER!r} must be the 'id' of an event of this server, not {event_id[:32]!r}."
            raise bad_request(LAST_EVENT_ID_HEADER, message, "invalid_event_id") from None

    def encode(self) -> bytes:
        return VERSION.encode() + base64.urlsafe_b64encode(msgspec.msgpack.encode(self))


class ResumableStream:
    """Where a resumable stream is, and where its client has been already."""

    def __init__(self, job: GenerationJob, told: StreamPosition | None) -> None:
        """Raises `ApiError` (400) for a position of another request."""
        fresh = tuple(ChoicePosition() for _ in job.sequences)
        self._told = None if told is None else told.marks
        self._at = told or StreamPosition(job.request_id, job.created, job.sequences[0].seed, fresh)
        if len(self._at.marks) != len(fresh):
            theirs, ours = len(self._at.marks), len(fresh)
            message = f"{LAST_EVENT_ID_HEADER!r} is of a stream of {theirs} choices, and this request has {ours}."
            raise bad_request(LAST_EVENT_ID_HEADER, message, "invalid_event_id")

    def retelling(self, index: int) -> ReplayFilter:
        return ReplayFilter(ChoicePosition() if self._told is None else self._told[index])

    def event(self, renderer: Renderer, index: int, delta: ChoiceDelta) -> bytes:
        """As of `renderer`, with the position behind it; empty for what the client has."""
        assert delta.mark is not None, "each delta of a resumable stream is marked"
        if self._told is not None and not delta.mark.is_after(self._told[index]):
            renderer.event(index, delta)  # it counts tokens, and knows what has begun
            return b""
        marks = list(self._at.marks)
        marks[index] = delta.mark
        self._at = msgspec.structs.replace(self._at, marks=tuple(marks))
        return renderer.event(index, delta, self._at.encode())


class ReplayFilter:
    """Outputs of a choice whose beginning the client may know: cut and marked."""

    def __init__(self, told: ChoicePosition) -> None:
        self._told = told
        self._mark = ChoicePosition()

    def cut(self, output: EngineOutput) -> list[EngineOutput]:
        """Token by token: however they came, the events are the same, and the news begin with one of them."""
        if len(output.token_ids) <= 1:
            return [output]
        return [_part(output, at) for at in range(len(output.token_ids))]

    def marked(self, delta: ChoiceDelta, output: EngineOutput) -> ChoiceDelta:
        """What a part became, with how far the choice is now. Raises `ApiError` (409) where it is another one than the
        client was told.
        """
        mark = self._mark = self._mark.after(output.token_ids, is_whole=delta.finish_reason is not None)
        told = self._told
        arrives = mark.num_tokens == told.num_tokens > 0 and len(output.token_ids) > 0
        if (arrives and mark != told) or (mark.is_whole and mark.num_tokens < told.num_tokens):
            message = "The tokens of the stream cannot be generated again as they were. Send the request anew."
            raise ApiError(409, message, type="conflict", code="stream_diverged")
        return msgspec.structs.replace(delta, mark=mark)


def _part(output: EngineOutput, at: int) -> EngineOutput:
    """One of its tokens. What comes first or last with an output comes with its first or last part."""
    logprobs = None if output.logprobs is None else output.logprobs[at : at + 1]
    part = msgspec.structs.replace(output, token_ids=output.token_ids[at : at + 1], logprobs=logprobs)
    if at > 0:
        part = msgspec.structs.replace(part, num_cached_tokens=0, prompt_logprobs=None)
    if at < len(output.token_ids) - 1:
        part = msgspec.structs.replace(part, finish_reason=None, stop_token_id=None)
    return part
