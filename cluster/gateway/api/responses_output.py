"""The growing output items of a response, and the events that report them.

             reasoning            content            a call begins
NOTHING ──> reasoning ────────> message ──────────> function_call ──┐     each closes the item before it
              ^───────────────────^──────────────────────^──────────┘

The events of an item: output_item.added, content_part.added, ..delta, ..delta, ..done, content_part.done,
output_item.done; a call has no parts. Streamed and whole responses both get their items from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from baton.engine.text import Tokenizer

from .detokenize import LocatedToken
from .logprobs import chat_tokens, streamed_tokens
from .renderer import HOLE, Pieces
from .tools import digest

Status = Literal["in_progress", "completed", "incomplete"]
NO_LOGPROBS = msgspec.Raw(b"[]")


class LogprobList(NamedTuple):
    """Log probabilities that are written into a hole of the JSON."""

    write: Callable[[Tokenizer, Sequence[LocatedToken]], Pieces]
    tokens: Sequence[LocatedToken]


class OutputEvent(NamedTuple):
    kind: str  # the event's type, without the prefix `response.`
    fields: dict[str, Any]  # without `type` and `sequence_number`
    lists: Sequence[LogprobList] = ()  # one for each hole in `fields`


class OutputTextPart(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: tuple[()] = ()
    logprobs: msgspec.Raw = msgspec.field(default_factory=lambda: NO_LOGPROBS)


class ReasoningTextPart(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: Status = "in_progress"
    role: str = "assistant"
    content: tuple[OutputTextPart, ...] = ()


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    status: Status = "in_progress"
    summary: tuple[()] = ()
    content: tuple[ReasoningTextPart, ...] = ()


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


Item = MessageItem | ReasoningItem | FunctionCallItem


class Output:
    """The output of one response. Each method returns the events of its change."""

    def __init__(self, response_id: str) -> None:
        self.items: list[Item] = []
        self._response_id = response_id
        self._is_open = False  # True if the last item still grows
        self._pieces: list[str] = []  # of the open item's text or arguments
        self._tokens: list[LocatedToken] = []  # of the open item, if log probabilities were requested
        self.lists: list[LogprobList] = []  # one for each hole in `items`

    def add_reasoning(self, text: str) -> list[OutputEvent]:
        opened = (
            [] if self._grows(ReasoningItem) else self._open(ReasoningItem(self._item_id("rs")), ReasoningTextPart())
        )
        self._pieces.append(text)
        return [*opened, self._event("reasoning_text.delta", content_index=0, delta=text)]

    def add_text(self, text: str, tokens: Sequence[LocatedToken] = ()) -> list[OutputEvent]:
        opened = [] if self._grows(MessageItem) else self._open(MessageItem(self._item_id("msg")), OutputTextPart())
        self._pieces.append(text)
        self._tokens += tokens
        delta = self._event("output_text.delta", content_index=0, delta=text, logprobs=_hole(tokens))
        return [*opened, delta._replace(lists=_lists(streamed_tokens, tokens))]

    def begin_call(self, name: str, call_id: str) -> list[OutputEvent]:
        return self._open(FunctionCallItem(self._item_id("fc"), call_id, name), None)

    def add_arguments(self, text: str) -> list[OutputEvent]:
        """Add text to the arguments of the newest call."""
        self._pieces.append(text)
        return [self._event("function_call_arguments.delta", delta=text)]

    def close(self, status: Status = "completed", *, is_in_call: bool = False) -> list[OutputEvent]:
        """Close the open item, if any. For a call, `is_in_call` (it is incomplete) counts instead of `status`."""
        if not self._is_open:
            return []
        self._is_open = False
        item, text = self.items[-1], "".join(self._pieces)
        lists: list[LogprobList] = []
        match item:
            case MessageItem():
                words = OutputTextPart(text, logprobs=_hole(self._tokens))
                self.items[-1] = replace(item, status=status, content=(words,))
                streamed, lists = _lists(streamed_tokens, self._tokens), _lists(chat_tokens, self._tokens)
                self.lists += lists
                done = self._event("output_text.done", content_index=0, text=text, logprobs=words.logprobs)
                part_done = self._event("content_part.done", content_index=0, part=words)
                events = [done._replace(lists=streamed), part_done._replace(lists=lists)]
            case ReasoningItem():
                thoughts = ReasoningTextPart(text)
                self.items[-1] = replace(item, status=status, content=(thoughts,))
                done = self._event("reasoning_text.done", content_index=0, text=text)
                events = [done, self._event("content_part.done", content_index=0, part=thoughts)]
            case FunctionCallItem():
                self.items[-1] = replace(item, status="incomplete" if is_in_call else "completed", arguments=text)
                events = [self._event("function_call_arguments.done", arguments=text)]
        return [
            *events,
            OutputEvent("output_item.done", {"output_index": len(self.items) - 1, "item": self.items[-1]}, lists),
        ]

    def finish(self, status: Status, *, is_in_call: bool) -> list[OutputEvent]:
        """Close the output. A completed one without a message or a call gets a message with empty text."""
        is_answered = any(isinstance(item, MessageItem | FunctionCallItem) for item in self.items)
        opened = (
            []
            if is_answered or status != "completed"
            else self._open(MessageItem(self._item_id("msg")), OutputTextPart())
        )
        return opened + self.close(status, is_in_call=is_in_call)

    def _grows(self, kind: type[Item]) -> bool:
        return self._is_open and isinstance(self.items[-1], kind)

    def _open(self, item: Item, part: OutputTextPart | ReasoningTextPart | None) -> list[OutputEvent]:
        events = self.close()
        self.items.append(item)
        self._is_open, self._pieces, self._tokens = True, [], []
        events.append(OutputEvent("output_item.added", {"output_index": len(self.items) - 1, "item": item}))
        if part is not None:
            events.append(self._event("content_part.added", content_index=0, part=part))
        return events

    def _event(self, kind: str, **fields: Any) -> OutputEvent:
        """Return an event of the newest item."""
        return OutputEvent(kind, {"item_id": self.items[-1].id, "output_index": len(self.items) - 1, **fields})

    def _item_id(self, prefix: str) -> str:
        """Return an id that every gateway would give the item, so that a stream can be resumed."""
        return f"{prefix}_{digest(self._response_id, len(self.items))}"


def _hole(tokens: Sequence[LocatedToken]) -> msgspec.Raw:
    return HOLE if tokens else NO_LOGPROBS


def _lists(
    write: Callable[[Tokenizer, Sequence[LocatedToken]], Pieces], tokens: Sequence[LocatedToken]
) -> list[LogprobList]:
    return [LogprobList(write, tokens)] if tokens else []
