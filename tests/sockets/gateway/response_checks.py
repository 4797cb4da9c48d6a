"""Checks that hold for every response of `/v1/responses`, by the official client's own types."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import httpx
from openai.types import responses as types
from pydantic import BaseModel

# Fields that OpenAI's servers send without a type in their client, and Baton's own fields.
BESIDE_THE_TYPES = {("Response", name) for name in ("store", "presence_penalty", "frequency_penalty", "baton_timeline")}
EVENTS: dict[str, type[BaseModel]] = {
    typing.get_args(member.model_fields["type"].annotation)[0]: member
    for member in typing.get_args(typing.get_args(types.ResponseStreamEvent)[0])
}
ENDS = ("response.completed", "response.incomplete", "response.failed")


def check_type(kind: type[BaseModel], data: Any) -> None:
    """Check that no field is missing, none needs a conversion, and none is unknown to the types."""
    value = kind.model_validate(data, strict=True)
    assert set(_unknown(value)) <= BESIDE_THE_TYPES


def _unknown(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, BaseModel):
        yield from ((type(value).__name__, name) for name in value.model_extra or {})
        value = list(value.__dict__.values())
    for part in value if isinstance(value, list) else []:
        yield from _unknown(part)


def whole(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    check_type(types.Response, response)
    return response


def stream(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events, after checking each of them and their sequence."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [payload for _, payload in blocks(answer.text)]
    check_stream(events)
    return events


def blocks(body: str) -> list[tuple[str | None, dict[str, Any]]]:
    """Return the id and the payload of each event."""
    assert body.endswith("\n\n")
    found = []
    for block in body.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        payload = json.loads(lines["data"])
        assert lines["event"] == payload["type"]
        found.append((lines.get("id"), payload))
    return found


def check_stream(events: list[dict[str, Any]]) -> None:
    for event in events:
        check_type(EVENTS[event["type"]], event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["type"] in ENDS for event in events] == [False] * (len(events) - 1) + [True]
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"]) == ("in_progress", [])
    assert last["status"] == events[-1]["type"].removeprefix("response.")
    assert last["id"] == first["id"]
    told = events[2:-1]
    items = [_check_item([event for event in told if event["output_index"] == index]) for index in range(len(told))]
    assert [item for item in items if item is not None] == last["output"]
    assert [event["output_index"] for event in told] == sorted(event["output_index"] for event in told)


def _check_item(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Check one item's events from first to last. Returns the finished item."""
    if not events:
        return None
    added, *middle, done = events
    assert (added["type"], done["type"]) == ("response.output_item.added", "response.output_item.done")
    assert added["item"]["status"] == "in_progress"
    assert added["item"]["id"] == done["item"]["id"]
    assert {event["item_id"] for event in middle} == {done["item"]["id"]}
    item = done["item"]
    if item["type"] == "function_call":
        *deltas, whole_arguments = middle
        assert whole_arguments["type"] == "response.function_call_arguments.done"
        assert _joined(deltas, "response.function_call_arguments.delta") == whole_arguments["arguments"]
        assert item["arguments"] == whole_arguments["arguments"]
        return item
    name = {"message": "output_text", "reasoning": "reasoning_text"}[item["type"]]
    begin, *deltas, whole_text, end = middle
    assert (begin["type"], end["type"]) == ("response.content_part.added", "response.content_part.done")
    assert whole_text["type"] == f"response.{name}.done"
    assert begin["part"]["text"] == ""
    assert _joined(deltas, f"response.{name}.delta") == whole_text["text"] == end["part"]["text"]
    assert item["content"] == [end["part"]]
    if name == "output_text":
        assert [each for delta in deltas for each in delta["logprobs"]] == whole_text["logprobs"]
    return item


def _joined(deltas: list[dict[str, Any]], kind: str) -> str:
    assert {delta["type"] for delta in deltas} <= {kind}
    return "".join(delta["delta"] for delta in deltas)


def names(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events without their common prefix; consecutive equal deltas appear once."""
    found: list[str] = []
    for event in events:
        name = event["type"].removeprefix("response.")
        if not (name.endswith(".delta") and found and found[-1] == name):
            found.append(name)
    return found
