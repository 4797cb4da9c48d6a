"""Answers of `/v1/messages`: a chat answer with one choice, sent as content blocks and events.

    message_start ──> for each block: content_block_start, content_block_delta ..., content_block_stop
                  ──> message_delta, message_stop

An error in the middle of a stream is the event `error`. Streamed and whole answers have the same blocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pydantic_core
from msgspec import UNSET, UnsetType

from baton.engine.text import ContentPart, OutputPart, ReasoningPart, Tokenizer, ToolCallArguments, ToolCallStart

from ..errors import ApiError
from ..serving.timeline import TimelineReport
from .answer_reader import AnswerReader
from .detokenize import ChoiceDelta
from .job import GenerationJob
from .reasoning import sealed_thoughts
from .renderer import Pieces, Text, UsageCounter, encode, read_in_turns
from .tools import digest

NO_INPUT = msgspec.Raw(b"{}")


class ThinkingTokens(msgspec.Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    """Token usage. The prompt's tokens are the sum of computed tokens and tokens read from the cache."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    cache_creation_input_tokens: int = 0  # for prefixes with a cache mark, which Baton does not need


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str = ""


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str = ""
    # Clients drop thoughts without a signature. Baton's is a checksum that is not checked, or holds omitted thoughts.
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw = msgspec.field(default_factory=lambda: NO_INPUT)


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageObject(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    model: str
    usage: MessageUsage
    role: str = "assistant"
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    baton_timeline: list[TimelineReport] | UnsetType = UNSET


class AnswerTextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class StopDelta(msgspec.Struct, frozen=True):
    stop_reason: str
    stop_sequence: str | None


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    message: MessageObject


class BlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class BlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: AnswerTextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage
    baton_timeline: list[TimelineReport] | UnsetType = UNSET


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class TokenCount(msgspec.Struct, frozen=True):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class Content:
    """The blocks of one answer as they grow. Each method returns the events of its change."""

    def __init__(self, omits_thoughts: bool = False) -> None:
        self._omits_thoughts = omits_thoughts
        self.blocks: list[Block] = []
        self._is_open = False  # True if the last block still grows
        self._pieces: list[str] = []  # of the open block's text or input

    def add_thinking(self, text: str) -> list[Event]:
        opened = self._open(ThinkingBlock())
        if not self._omits_thoughts:
            return [*opened, self._grow(text, ThinkingDelta(text))]
        empty = self._grow(text, ThinkingDelta(""))
        return [*opened, empty] if opened else []

    def add_text(self, text: str) -> list[Event]:
        return [*self._open(TextBlock()), self._grow(text, AnswerTextDelta(text))]

    def begin_call(self, name: str, call_id: str) -> list[Event]:
        return [*self.close(), *self._open(ToolUseBlock(call_id, name))]

    def add_input(self, text: str) -> list[Event]:
        """Add text to the input of the newest call."""
        return [self._grow(text, InputJsonDelta(text))]

    def close(self) -> list[Event]:
        """Close the open block, if any."""
        if not self._is_open:
            return []
        self._is_open = False
        index, block, text = len(self.blocks) - 1, self.blocks[-1], "".join(self._pieces)
        events: list[Event] = []
        match block:
            case TextBlock():
                self.blocks[-1] = TextBlock(text)
            case ThinkingBlock():
                signature = sealed_thoughts(text) if self._omits_thoughts else digest(text)
                self.blocks[-1] = ThinkingBlock("" if self._omits_thoughts else text, signature)
                events.append(BlockDelta(index, SignatureDelta(signature)))
            case ToolUseBlock(call_id, name):
                self.blocks[-1] = ToolUseBlock(call_id, name, readable_input(text))
        return [*events, BlockStop(index)]

    def _open(self, block: Block) -> list[Event]:
        """Open a block unless one of its type is open."""
        if self._is_open and isinstance(self.blocks[-1], type(block)):
            return []
        events = self.close()
        self.blocks.append(block)
        self._is_open, self._pieces = True, []
        return [*events, BlockStart(len(self.blocks) - 1, block)]

    def _grow(self, text: str, delta: AnswerTextDelta | ThinkingDelta | InputJsonDelta) -> Event:
        self._pieces.append(text)
        return BlockDelta(len(self.blocks) - 1, delta)


def readable_input(arguments: str) -> msgspec.Raw:
    """Return the input of a call as a JSON object; if the call was cut off, with the values that are complete."""
    try:
        if isinstance(json.loads(arguments, parse_constant=_refuse), dict):
            return msgspec.Raw(arguments.encode())
    except (ValueError, RecursionError):
        pass  # incomplete
    try:
        value = pydantic_core.from_json(arguments, allow_inf_nan=False, allow_partial=True)
    except ValueError:
        return NO_INPUT
    return msgspec.Raw(json.dumps(value, ensure_ascii=False).encode()) if isinstance(value, dict) else NO_INPUT


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


class MessagesRenderer:
    """The `Renderer` of `/v1/messages`."""

    needs_each_delta = True

    def __init__(self, job: GenerationJob, model_id: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._model_id = model_id
        self._counter = UsageCounter(job)
        self._reader = AnswerReader(
            job.parser_config.new_parser(), has_logprobs=job.prepared.sampling.logprobs is not None
        )
        self._content = Content(job.prepared.omits_thoughts)
        self._stop = StopDelta("end_turn", None)
        self._has_begun = False

    def event(self, index: int, delta: ChoiceDelta, event_id: bytes = b"") -> Text:
        events = self._read(delta)
        if not self._has_begun:
            self._has_begun = True
            events.insert(0, MessageStart(MessageObject(self._id, self._model_id, self._usage())))
        texts = list(map(_sse, events))
        if event_id and texts:
            texts[-1] = b"id: " + event_id + b"\n" + texts[-1]
        return b"".join(texts)

    def end(self) -> Text:
        ending = MessageDelta(self._stop, self._usage(), self._counter.timelines())
        return _sse(ending) + _sse(MessageStop())

    def failed(self, error: ApiError) -> Text:
        return b"event: error\ndata: " + error.anthropic_body(self._job.request_id) + b"\n\n"

    def whole(self, choices: Sequence[Sequence[ChoiceDelta]]) -> Text:
        return self._read_and_write(choices[0])

    def _read_and_write(self, deltas: Sequence[ChoiceDelta]) -> Pieces:
        yield from read_in_turns(self._read, deltas)
        yield encode(
            MessageObject(
                self._id,
                self._model_id,
                self._usage(),
                content=self._content.blocks,
                stop_reason=self._stop.stop_reason,
                stop_sequence=self._stop.stop_sequence,
                baton_timeline=self._counter.timelines(),
            )
        )

    @property
    def _id(self) -> str:
        return f"msg_{self._job.request_id}"

    def _read(self, delta: ChoiceDelta) -> list[Event]:
        self._counter.add(0, delta)
        events: list[Event] = []
        for part, _ in self._reader.push(delta):
            events += self._write(part)
        if delta.finish_reason is not None:
            events += self._content.close()
            sequence = delta.stop_reason if isinstance(delta.stop_reason, str) else None
            self._stop = StopDelta(self._stop_reason(delta.finish_reason, sequence), sequence)
        return events

    def _write(self, part: OutputPart) -> list[Event]:
        match part:
            case ReasoningPart(text):
                return self._content.add_thinking(text)
            case ContentPart(text):
                return self._content.add_text(text)
            case ToolCallStart(number, name):
                call_id = digest(self._job.request_id, self._job.created, 0, number)
                return self._content.begin_call(name, f"toolu_{call_id}")
            case ToolCallArguments(_, text):
                return self._content.add_input(text)

    def _stop_reason(self, finish_reason: str, sequence: str | None) -> str:
        """Return the stop reason; `tool_use` only if all calls are complete, since it tells the client to run them."""
        if finish_reason == "length":
            return "max_tokens"
        if self._reader.num_calls > 0 and not self._reader.is_in_call:
            return "tool_use"
        return "end_turn" if sequence is None else "stop_sequence"

    def _usage(self) -> MessageUsage:
        counted = self._counter.usage()
        cached = counted.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=counted.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=counted.completion_tokens,
            output_tokens_details=ThinkingTokens(self._reader.num_reasoning_tokens),
        )


def _sse(event: Event) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (str(event.__struct_config__.tag).encode(), encode(event))
