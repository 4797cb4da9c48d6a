"""Resumes a stream whose gateway died at another gateway, which has no state about it.

    POST {..., "stream": true, "stream_options": {"resumable": true}}    ──> each event has an `id: POSITION`
    the connection breaks
    the same POST to any gateway, with `last-event-id: POSITION`         ──> the events after that one

A position holds the seed and, for each choice, the number of tokens that were sent, with a checksum. Random draws
depend only on seed and position, so the same tokens are generated again, but not sent again. If they differ, as on
engines that round differently, the answer is a 409 before anything is sent, and the client has to start again. No
gateway, engine or directory keeps state for streams that might break.
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
from .renderer import Renderer, Text

LAST_EVENT_ID_HEADER = "last-event-id"
ID_VERSION = "1."  # version of an id's format
MAX_ID_CHARS = 64 << 10

Count = Annotated[int, msgspec.Meta(ge=0)]


class StreamPosition(msgspec.Struct, frozen=True, array_like=True):
    """A position in a stream, between two events."""

    request_id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]  # ids of chunks are made from it
    created: Count
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**SEED_BITS - 1)]
    choices: tuple[ChoicePosition, ...]

    @classmethod
    def from_event_id(cls, event_id: str | None, *, is_resumable: bool) -> Self | None:
        """Decode the client's last event id; None if it sent none. Raises `ApiError` (400) for a malformed id."""
        if event_id is None:
            return None
        if not is_resumable:
            message = f"{LAST_EVENT_ID_HEADER!r} is for requests with 'stream' and 'stream_options.resumable'."
            raise bad_request(LAST_EVENT_ID_HEADER, message, "not_resumable")
        try:
            if not event_id.startswith(ID_VERSION) or len(event_id) > MAX_ID_CHARS:
                raise ValueError
            return msgspec.msgpack.decode(base64.b64decode(event_id[len(ID_VERSION) :], b"-_", validate=True), type=cls)
        except (ValueError, msgspec.MsgspecError):
            message = f"{LAST_EVENT_ID_HEADER!r} must be the 'id' of an event of this server, not {event_id[:32]!r}."
            raise bad_request(LAST_EVENT_ID_HEADER, message, "invalid_event_id") from None

    def encode(self) -> bytes:
        return ID_VERSION.encode() + base64.urlsafe_b64encode(msgspec.msgpack.encode(self))


class ResumableStream:
    """The position of a stream, and the position up to which its client has received it."""

    def __init__(self, job: GenerationJob, resumed_from: StreamPosition | None) -> None:
        """Raise `ApiError` (400) if the position belongs to another request."""
        fresh = tuple(ChoicePosition() for _ in job.sequences)
        self._client_has = None if resumed_from is None else resumed_from.choices
        self._position = resumed_from or StreamPosition(job.request_id, job.created, job.sequences[0].seed, fresh)
        if len(self._position.choices) != len(fresh):
            theirs, ours = len(self._position.choices), len(fresh)
            message = f"{LAST_EVENT_ID_HEADER!r} is of a stream of {theirs} choices, and this request has {ours}."
            raise bad_request(LAST_EVENT_ID_HEADER, message, "invalid_event_id")

    def replay_filter(self, index: int) -> ReplayFilter:
        return ReplayFilter(ChoicePosition() if self._client_has is None else self._client_has[index])

    def event(self, renderer: Renderer, index: int, delta: ChoiceDelta) -> Text:
        """Return the renderer's events with the position after them; empty if the client has them already."""
        assert delta.position is not None, "each delta of a resumable stream has a position"
        if self._client_has is not None and not delta.position.is_after(self._client_has[index]):
            renderer.event(index, delta)  # updates the renderer's token counts and open items
            return b""
        choices = list(self._position.choices)
        choices[index] = delta.position
        self._position = msgspec.structs.replace(self._position, choices=tuple(choices))
        return renderer.event(index, delta, self._position.encode())


class ReplayFilter:
    """Splits the outputs of a choice into tokens, and checks the tokens that the client already has."""

    def __init__(self, sent: ChoicePosition) -> None:
        self._client_has = sent
        self._position = ChoicePosition()

    def split(self, output: EngineOutput) -> list[EngineOutput]:
        """Split an output into tokens, so that events do not depend on how the tokens were grouped."""
        if len(output.token_ids) <= 1:
            return [output]
        return [_part(output, at) for at in range(len(output.token_ids))]

    def with_position(self, delta: ChoiceDelta, output: EngineOutput) -> ChoiceDelta:
        """Return a delta with the choice's position after it.

        Raises `ApiError` (409) if its tokens differ from those that the client has.
        """
        position = self._position = self._position.after(output.token_ids, is_whole=delta.finish_reason is not None)
        sent = self._client_has
        arrives = position.num_tokens == sent.num_tokens > 0 and len(output.token_ids) > 0
        if (arrives and position != sent) or (position.is_whole and position.num_tokens < sent.num_tokens):
            message = "The tokens of the stream cannot be generated again as they were. Send the request again."
            raise ApiError(409, message, type="conflict", code="stream_diverged")
        return msgspec.structs.replace(delta, position=position)


def _part(output: EngineOutput, at: int) -> EngineOutput:
    """Return one token of an output. Fields of a first or last output stay with its first or last token."""
    logprobs = None if output.logprobs is None else output.logprobs.part(at, at + 1)
    part = msgspec.structs.replace(output, token_ids=output.token_ids[at : at + 1], logprobs=logprobs)
    if output.drafts is not None:
        part = msgspec.structs.replace(part, drafts=output.drafts.of_token(at))
    if at > 0:
        part = msgspec.structs.replace(part, num_cached_tokens=0, prompt_logprobs=None)
    if at < len(output.token_ids) - 1:
        part = msgspec.structs.replace(part, finish_reason=None, stop_token_id=None)
    return part
