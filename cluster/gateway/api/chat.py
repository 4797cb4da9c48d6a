"""Responses of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec
from msgspec import UNSET, UnsetType

from baton.engine.text import ContentPart, OutputPart, ReasoningPart, Tokenizer, ToolCallArguments, ToolCallStart

from ..errors import ApiError
from ..serving.timeline import TimelineReport
from .detokenize import ChoiceDelta
from .job import GenerationJob
from .logprobs import chat_logprobs, prompt_logprobs
from .renderer import DONE, HOLE, Pieces, Text, Usage, UsageCounter, at_once, error_event, fill, join, sse, sse_filled
from .tools import call_id


class FunctionDelta(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(msgspec.Struct):
    """A piece of a tool call: the first has its id and name, the others more of its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same text, under vLLM's newer name
    content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: msgspec.Raw | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET  # with `return_token_ids`


class ChatChunk(msgspec.Struct, tag_field="object", tag="chat.completion.chunk"):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    baton_timeline: list[TimelineReport] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first chunk of a choice, with `return_token_ids`


class AnsweredFunctionCall(msgspec.Struct):
    name: str
    arguments: str = ""


class AnsweredToolCall(msgspec.Struct, tag_field="type", tag="function"):
    id: str
    function: AnsweredFunctionCall


class AnsweredMessage(msgspec.Struct, tag_field="role", tag="assistant"):
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same text, under vLLM's newer name
    tool_calls: list[AnsweredToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AnsweredMessage
    logprobs: msgspec.Raw | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET  # with `return_token_ids`


class ChatCompletion(msgspec.Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: msgspec.Raw | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # with `return_token_ids`
    baton_timeline: list[TimelineReport] | UnsetType = UNSET


class ChatRenderer:
    """The `Renderer` of chat completions."""

    needs_each_delta = False

    def __init__(self, job: GenerationJob, model_id: str, tokenizer: Tokenizer) -> None:
        self._id = f"chatcmpl-{job.request_id}"
        self._job = job
        self._model_id = model_id
        self._tokenizer = tokenizer
        self._counter = UsageCounter(job)
        self._begun = [False] * len(job.sequences)
        self._readers = [job.parser_config.new_parser() for _ in job.sequences]

    def event(self, index: int, delta: ChoiceDelta, event_id: bytes = b"") -> Text:
        self._counter.add(index, delta)
        opening = b""
        if not self._begun[index]:
            self._begun[index] = True
            opening = self._opening(index)
        gained = self._gained(index, delta)
        if not (gained or delta.tokens or delta.token_ids or delta.finish_reason):
            return opening
        *first, last = gained or [ChatDelta()]
        choice = ChunkChoice(
            index,
            last,
            HOLE if delta.tokens else None,
            self._finish_reason(index, delta),
            delta.stop_reason if delta.finish_reason else UNSET,
            self._token_ids(delta),
        )
        before = opening + b"".join([self._chunk([ChunkChoice(index, each)]) for each in first])
        if not delta.tokens:
            return before + self._chunk([choice], event_id)
        chunk = self._as_chunk([choice])
        event = sse_filled(chunk, event_id, [chat_logprobs(self._tokenizer, delta.tokens)], delta.num_logprobs)
        return before + event if isinstance(event, bytes) else chain([before], event)

    def end(self) -> bytes:
        ending = self._counter.at_end()
        return (sse(ChatChunk(self._id, self._job.created, self._model_id, [], *ending)) if ending else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        return error_event(error)

    def whole(self, choices: Sequence[Sequence[ChoiceDelta]]) -> Text:
        answer = []
        parts: list[Pieces] = []
        num_logprobs = 0
        prompt = None
        for index, deltas in enumerate(choices):
            delta = join(deltas)
            self._counter.add(index, delta)
            prompt = delta.prompt_logprobs if prompt is None else prompt  # equal in all choices
            num_logprobs += delta.num_logprobs
            if delta.tokens:
                parts.append(chat_logprobs(self._tokenizer, delta.tokens))
            message = self._message(index, delta)  # first, because the finish reason depends on its calls
            reason = self._finish_reason(index, delta)
            logprobs = HOLE if delta.tokens else None
            answer.append(ChatChoice(index, message, logprobs, reason, delta.stop_reason, self._token_ids(delta)))
        completion = ChatCompletion(self._id, self._job.created, self._model_id, answer, self._counter.usage())
        if prompt is not None:
            completion.prompt_logprobs = HOLE
            parts.append(prompt_logprobs(self._tokenizer, prompt))
        completion.prompt_token_ids = self._prompt_token_ids()
        completion.baton_timeline = self._counter.timelines()
        return at_once(fill(completion, parts), num_logprobs)

    def _opening(self, index: int) -> bytes:
        chunk = self._as_chunk([ChunkChoice(index, ChatDelta(role="assistant", content=""))])
        chunk.prompt_token_ids = self._prompt_token_ids()
        return sse(chunk)

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self._job.prepared.prompts[0] if self._job.prepared.returns_token_ids else UNSET

    def _token_ids(self, delta: ChoiceDelta) -> list[int] | UnsetType:
        return delta.token_ids if self._job.prepared.returns_token_ids else UNSET

    def _chunk(self, choices: list[ChunkChoice], event_id: bytes = b"") -> bytes:
        return sse(self._as_chunk(choices), event_id)

    def _as_chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        usage = self._counter.in_chunk()
        return ChatChunk(self._id, self._job.created, self._model_id, choices, usage)

    def _gained(self, index: int, delta: ChoiceDelta) -> list[ChatDelta]:
        """Return what a delta adds to a choice, as chat deltas in order."""
        return [self._as_delta(index, part) for part in self._read(index, delta)]

    def _read(self, index: int, delta: ChoiceDelta) -> list[OutputPart]:
        return self._readers[index].push(delta.text, finished=delta.model_ended)

    def _as_delta(self, index: int, part: OutputPart) -> ChatDelta:
        match part:
            case ReasoningPart(text):
                return ChatDelta(reasoning_content=text, reasoning=text)
            case ContentPart(text):
                return ChatDelta(content=text)
            case ToolCallStart(number, name):
                call = CallDelta(number, FunctionDelta("", name), self._call_id(index, number), "function")
            case ToolCallArguments(number, text):
                call = CallDelta(number, FunctionDelta(text))
        return ChatDelta(tool_calls=[call])

    def _message(self, index: int, delta: ChoiceDelta) -> AnsweredMessage:
        parts = self._read(index, delta)
        message = AnsweredMessage("".join(part.text for part in parts if isinstance(part, ContentPart)))
        if thought := "".join(part.text for part in parts if isinstance(part, ReasoningPart)):
            message.reasoning_content = message.reasoning = thought
        calls: list[AnsweredToolCall] = []
        for part in parts:
            if isinstance(part, ToolCallStart):
                calls.append(AnsweredToolCall(self._call_id(index, part.index), AnsweredFunctionCall(part.name)))
            elif isinstance(part, ToolCallArguments):
                calls[part.index].function.arguments += part.text
        if calls:
            message.tool_calls = calls
            message.content = message.content or None
        return message

    def _finish_reason(self, index: int, delta: ChoiceDelta) -> str | None:
        """Return the finish reason: `tool_calls` only if all calls are complete, since clients then run them."""
        reader = self._readers[index]
        asks = reader.num_calls > 0 and not reader.is_in_call
        return "tool_calls" if asks and delta.finish_reason == "stop" else delta.finish_reason

    def _call_id(self, index: int, number: int) -> str:
        return call_id(self._job.request_id, self._job.created, index, number)
