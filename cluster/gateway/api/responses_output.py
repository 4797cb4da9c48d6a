"""Output items of a response as they grow, and the events that report them.

             reasoning            content            a call begins
NOTHING ──> reasoning ────────> message ──────────> function_call ──┐     each closes the item before it
              ^───────────────────^──────────────────────^──────────┘

An item's events: output_item.added, content_part.added, ..delta, ..delta, ..done, content_part.done, output_item.done;
a call has no parts. Streamed and whole responses take their items from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from .logprobs import ChatTokenLogprob
from .tools import digest

Status = Literal["in_progress", "completed", "incomplete"]
Event = tuple[str, dict[str, Any]]  # type without `response.`, and fields beside type and number


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
    """A token's log probability in an event, which lacks the bytes that the content part has."""

    token: str
    logprob: float
    top_logprobs: list[StreamedTop]


class Output:
    """The output of one response. Each method returns the events of the change that it makes."""

    def __init__(self, response_id: str) -> None:
        self.items: list[Item] = []
        self._response_id = response_id
        self._is_open = False  # True while the last item grows
        self._pieces: list[str] = []  # of its text or arguments
        self._logprobs: list[ChatTokenLogprob] = []

    def add_reasoning(self, text: str) -> list[Event]:
        opened = (
            [] if self._grows(ReasoningItem) else self._open(ReasoningItem(self._item_id("rs")), ReasoningTextPart())
        )
        self._pieces.append(text)
        return [*opened, self._event("reasoning_text.delta", content_index=0, delta=text)]

    def add_text(self, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> list[Event]:
        opened = [] if self._grows(MessageItem) else self._open(MessageItem(self._item_id("msg")), OutputTextPart())
        self._pieces.append(text)
        self._logprobs += logprobs
        return [*opened, self._event("output_text.delta", content_index=0, delta=text, logprobs=_streamed(logprobs))]

    def begin_call(self, name: str, call_id: str) -> list[Event]:
        return self._open(FunctionCallItem(self._item_id("fc"), call_id, name), None)

    def add_arguments(self, text: str) -> list[Event]:
        """Extend the arguments of the newest call."""
        self._pieces.append(text)
        return [self._event("function_call_arguments.delta", delta=text)]

    def close(self, status: Status = "completed", *, is_in_call: bool = False) -> list[Event]:
        """Close the open item, if there is one. A call ignores `status`: it is incomplete if `is_in_call`."""
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
        """Close the output. A completed one without a message or call gets a message with an empty text."""
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
        """Return an event of the newest item."""
        return kind, {"item_id": self.items[-1].id, "output_index": len(self.items) - 1, **fields}

    def _item_id(self, prefix: str) -> str:
        """Return an id that is the same at every gateway, for streams that are resumed."""
        return f"{prefix}_{digest(self._response_id, len(self.items))}"


def _streamed(logprobs: Sequence[ChatTokenLogprob]) -> list[StreamedLogprob]:
    return [
        StreamedLogprob(each.token, each.logprob, [StreamedTop(top.token, top.logprob) for top in each.top_logprobs])
        for each in logprobs
    ]
