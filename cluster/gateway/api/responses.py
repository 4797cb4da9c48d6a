"""Responses of `/v1/responses`: a chat answer with one choice, sent as items and events.

    response.created, response.in_progress ──> events of its items ──> response.completed | .incomplete | .failed

Responses are not stored, so a client cannot retrieve them later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from baton.engine.text import ContentPart, OutputPart, ReasoningPart, Tokenizer, ToolCallArguments, ToolCallStart

from ..errors import ApiError
from ..serving.timeline import TimelineReport
from .answer_reader import AnswerReader
from .detokenize import ChoiceDelta, LocatedToken
from .job import GenerationJob, PreparedRequest
from .logprobs import num_logprobs
from .prepare import Preparer
from .renderer import Pieces, Text, UsageCounter, at_once, fill, read_in_turns
from .responses_input import ResponseChat, as_chat
from .responses_output import Item, LogprobList, Output, OutputEvent, Status
from .responses_request import FIELDS, InputTokensRequest, ResponsesRequest
from .tools import call_id


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int  # computed for this request, and cached from then on


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseError(msgspec.Struct, frozen=True):
    code: str  # one of the few codes that OpenAI has; `type` is as in other errors
    message: str
    type: str


class ResponseObject(msgspec.Struct, tag_field="object", tag="response"):
    """The response: the fields of the request, with defaults filled in, and the output."""

    id: str
    created_at: int
    model: str
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    presence_penalty: float
    frequency_penalty: float
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    user: str | None
    status: str = "in_progress"
    output: list[Item] = []
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    background: bool = False
    previous_response_id: str | None = None
    service_tier: str = "default"
    store: bool = False
    truncation: str = "disabled"
    baton_timeline: list[TimelineReport] | UnsetType = UNSET

    @classmethod
    def in_progress(cls, job: GenerationJob, model_id: str) -> ResponseObject:
        asked, sampling = job.prepared.response_echo, job.prepared.sampling
        assert asked is not None, "a request of this endpoint"
        return cls(
            id=f"resp_{job.request_id}",
            created_at=job.created,
            model=model_id,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            max_tool_calls=asked.max_tool_calls,
            metadata=asked.metadata,
            parallel_tool_calls=asked.parallel_tool_calls,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            prompt_cache_key=asked.prompt_cache_key,
            reasoning=asked.reasoning,
            safety_identifier=asked.safety_identifier,
            temperature=sampling.temperature,
            text=asked.text,
            tool_choice=asked.tool_choice,
            tools=asked.tools,
            top_logprobs=asked.top_logprobs,
            top_p=sampling.top_p,
            user=asked.user,
        )


def parse_response(data: dict[str, Any]) -> ResponseChat:
    """Validate a body. Raises `ApiError` (400) that names the invalid field."""
    return as_chat(FIELDS.parse(ResponsesRequest, data))


async def prepare_response(preparer: Preparer, request: ResponseChat, key_salt: str) -> PreparedRequest:
    """Prepare the generation. Raises `ApiError` (400) that names the invalid field."""
    prepared = await preparer.converted_chat(request, FIELDS, key_salt)
    prepared.response_echo = request.asked.echo()
    return prepared


class InputTokens(msgspec.Struct, tag_field="object", tag="response.input_tokens"):
    """The answer of `/v1/responses/input_tokens`."""

    input_tokens: int


async def count_input_tokens(preparer: Preparer, data: dict[str, Any]) -> InputTokens:
    """Answer `/v1/responses/input_tokens`. Raises `ApiError` (400) that names the invalid field."""
    chat = as_chat(FIELDS.parse(InputTokensRequest, data))
    with FIELDS.in_errors():
        return InputTokens(len(await preparer.chat_tokens(chat)))


class ResponseEvent(msgspec.Struct):
    """An event of a stream. Its other fields depend on `type`, as OpenAI documents them."""

    type: str  # `response.created`, `response.output_text.delta`, ...
    sequence_number: int


class ResponsesRenderer:
    """The `Renderer` of `/v1/responses`."""

    needs_each_delta = True

    def __init__(self, job: GenerationJob, model_id: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._response = ResponseObject.in_progress(job, model_id)
        self._counter = UsageCounter(job)
        self._reader = AnswerReader(
            job.parser_config.new_parser(), has_logprobs=job.prepared.sampling.logprobs is not None
        )
        self._output = Output(self._response.id)
        self._num_events = 0

    def event(self, index: int, delta: ChoiceDelta, event_id: bytes = b"") -> Text:
        opening = self._opening()
        return self._encode_events([*opening, *self._read(delta)], event_id)

    def end(self) -> Text:
        return self._encode_events([self._whole_event()])

    def failed(self, error: ApiError) -> Text:
        events = self._opening() + self._output.close("incomplete", is_in_call=self._reader.is_in_call)
        self._response.error = ResponseError(_error_code(error.status), error.message, error.type)
        self._settle("failed")
        return self._encode_events([*events, self._whole_event()])

    def whole(self, choices: Sequence[Sequence[ChoiceDelta]]) -> Text:
        return self._read_and_write(choices[0])

    def _read_and_write(self, deltas: Sequence[ChoiceDelta]) -> Pieces:
        yield from read_in_turns(self._read, deltas)
        yield from fill(self._response, self._parts(self._output.lists))

    def _read(self, delta: ChoiceDelta) -> list[OutputEvent]:
        self._counter.add(0, delta)
        events: list[OutputEvent] = []
        for part, tokens in self._reader.push(delta):
            events += self._write(part, tokens)
        if delta.finish_reason is not None:
            events += self._finish("incomplete" if delta.finish_reason == "length" else "completed")
        return events

    def _write(self, part: OutputPart, tokens: list[LocatedToken]) -> list[OutputEvent]:
        match part:
            case ReasoningPart(text):
                return self._output.add_reasoning(text)
            case ContentPart(text):
                return self._output.add_text(text, tokens)
            case ToolCallStart(number, name):
                return self._output.begin_call(name, call_id(self._job.request_id, self._job.created, 0, number))
            case ToolCallArguments(_, text):
                return self._output.add_arguments(text)

    def _finish(self, status: Status) -> list[OutputEvent]:
        events = self._output.finish(status, is_in_call=self._reader.is_in_call)
        self._settle(status)
        if status == "incomplete":
            self._response.incomplete_details = IncompleteDetails("max_output_tokens")
        else:
            self._response.completed_at = int(time.time())
        return events

    def _settle(self, status: str) -> None:
        self._response.status = status
        self._response.output = self._output.items
        self._response.usage = self._usage()
        self._response.baton_timeline = self._counter.timelines()

    def _usage(self) -> ResponseUsage:
        counted = self._counter.usage()
        cached = counted.prompt_tokens_details.cached_tokens
        return ResponseUsage(
            input_tokens=counted.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached, counted.prompt_tokens - cached),
            output_tokens=counted.completion_tokens,
            output_tokens_details=OutputTokensDetails(self._reader.num_reasoning_tokens),
            total_tokens=counted.total_tokens,
        )

    def _opening(self) -> list[OutputEvent]:
        if self._num_events:
            return []
        return [
            OutputEvent(kind, {"response": msgspec.structs.replace(self._response)})
            for kind in ("created", "in_progress")
        ]

    def _whole_event(self) -> OutputEvent:
        return OutputEvent(self._response.status, {"response": self._response}, self._output.lists)

    def _encode_events(self, events: list[OutputEvent], event_id: bytes = b"") -> Text:
        texts: list[Iterator[bytes]] = []
        for kind, fields, lists in events:
            event = {"type": f"response.{kind}", "sequence_number": self._num_events, **fields}
            texts.append(
                chain([b"event: response." + kind.encode() + b"\ndata: "], fill(event, self._parts(lists)), [b"\n\n"])
            )
            self._num_events += 1
        if event_id and texts:
            texts[-1] = chain([b"id: " + event_id + b"\n"], texts[-1])
        num_values = sum(num_logprobs(each.tokens) for event in events for each in event.lists)
        return at_once(chain.from_iterable(texts), num_values)

    def _parts(self, lists: Sequence[LogprobList]) -> list[Pieces]:
        return [each.write(self._tokenizer, each.tokens) for each in lists]


def _error_code(status: int) -> str:
    return {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(status, "server_error")
