"""The items of a response, as they grow, and the events that tell of it.

             thoughts             words              a call begins
NOTHING ──> reasoning ────────> message ──────────> function_call ──┐     each closes the item before it
              ^───────────────────^──────────────────────^──────────┘

An item's events: output_item.added, content_part.added, ..delta, ..delta, ..done, content_part.done, output_item.done;
a call has no parts. Whether an answer is streamed or not, its items come from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from .logprobs import ChatTokenLogprob
from .tools import digest

Status = Literal["in_progress", "completed", "incomplete"]
Event = tuple[str, dict[str, Any]]  # its type, without `response.`, and what it has beside type and number


class OutputTextPart(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: tuple[()] = ()
    logprobs: tuple[ChatTokenLogprob, ...] = ()


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


class StreamedTop(msgspec.Struct, frozen=True):
    token: str
    logprob: float


class StreamedLogprob(msgspec.Struct, frozen=True):
    """In events of a text; its part has the bytes, too."""

    token: str
    logprob: float
    top_logprobs: list[StreamedTop]


class Output:
    """What one response has so far. Each method returns the events of what it changes."""

    def __init__(self, response_id: str) -> None:
        self.items: list[Item] = []
        self._response_id = response_id
        self._is_open = False  # the last item
        self._pieces: list[str] = []  # of its text or arguments
        self._logprobs: list[ChatTokenLogprob] = []

    def think(self, text: str) -> list[Event]:
        opened = (
            [] if self._grows(ReasoningItem) else self._open(ReasoningItem(self._item_id("rs")), ReasoningTextPart())
        )
        self._pieces.append(text)
        return [*opened, self._event("reasoning_text.delta", content_index=0, delta=text)]

    def say(self, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> list[Event]:
        opened = [] if self._grows(MessageItem) else self._open(MessageItem(self._item_id("msg")), OutputTextPart())
        self._pieces.append(text)
        self._logprobs += logprobs
        return [*opened, self._event("output_text.delta", content_index=0, delta=text, logprobs=_streamed(logprobs))]

    def call(self, name: str, call_id: str) -> list[Event]:
        return self._open(FunctionCallItem(self._item_id("fc"), call_id, name), None)

    def argue(self, text: str) -> list[Event]:
        """Of the call that began last."""
        self._pieces.append(text)
        return [self._event("function_call_arguments.delta", delta=text)]

    def close(self, status: Status = "completed", *, is_in_call: bool = False) -> list[Event]:
        """The item that grows, where one does. Of a call only `is_in_call` matters: it is not whole."""
        if not self._is_open:
            return []
        self._is_open = False
        item, text = self.items[-1], "".join(self._pieces)
        match item:
            case MessageItem():
                words = OutputTextPart(text, logprobs=tuple(self._logprobs))
                self.items[-1] = replace(item, status=status, content=(words,))
                done = self._event("output_text.done", content_index=0, text=text, logprobs=_streamed(self._logprobs))
                events = [done, self._event("content_part.done", content_index=0, part=words)]
            case ReasoningItem():
                thoughts = ReasoningTextPart(text)
                self.items[-1] = replace(item, status=status, content=(thoughts,))
                done = self._event("reasoning_text.done", content_index=0, text=text)
                events = [done, self._event("content_part.done", content_index=0, part=thoughts)]
            case FunctionCallItem():
                self.items[-1] = replace(item, status="incomplete" if is_in_call else "completed", arguments=text)
                events = [self._event("function_call_arguments.done", arguments=text)]
        return [*events, ("output_item.done", {"output_index": len(self.items) - 1, "item": self.items[-1]})]

    def finish(self, status: Status, *, is_in_call: bool) -> list[Event]:
        """An answer that is complete says something or calls something, be it an empty text."""
        is_answered = any(isinstance(item, MessageItem | FunctionCallItem) for item in self.items)
        opened = (
            []
            if is_answered or status != "completed"
            else self._open(MessageItem(self._item_id("msg")), OutputTextPart())
        )
        return opened + self.close(status, is_in_call=is_in_call)

    def _grows(self, kind: type[Item]) -> bool:
        return self._is_open and isinstance(self.items[-1], kind)

    def _open(self, item: Item, part: OutputTextPart | ReasoningTextPart | None) -> list[Event]:
        events = self.close()
        self.items.append(item)
        self._is_open, self._pieces, self._logprobs = True, [], []
        events.append(("output_item.added", {"output_index": len(self.items) - 1, "item": item}))
        if part is not None:
            events.append(self._event("content_part.added", content_index=0, part=part))
        return events

    def _event(self, kind: str, **fields: Any) -> Event:
        """Of the last item."""
        return kind, {"item_id": self.items[-1].id, "output_index": len(self.items) - 1, **fields}

    def _item_id(self, prefix: str) -> str:
        """The same whoever generates the answer."""
        return f"{prefix}_{digest(self._response_id, len(self.items))}"


def _streamed(logprobs: Sequence[ChatTokenLogprob]) -> list[StreamedLogprob]:
    return [
        StreamedLogprob(each.token, each.logprob, [StreamedTop(top.token, top.logprob) for top in each.top_logprobs])
        for each in logprobs
    ]
