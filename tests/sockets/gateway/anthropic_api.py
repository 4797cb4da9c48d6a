"""Calls of `/v1/messages`, and their answers and events read as Anthropic's types."""

from __future__ import annotations

import json
from typing import Any

import httpx
from anthropic import types
from pydantic import TypeAdapter

from ...helpers.gateway_service import Service
from ...helpers.reasoning_model import HELLO, SIZE

TOOLS = [{"name": name, "input_schema": SIZE} for name in ("cut", "fold")]
TOLD = "cut fold " + HELLO
EVENT: TypeAdapter[Any] = TypeAdapter(types.RawMessageStreamEvent)


def user(content: Any = "hello") -> dict[str, Any]:
    return {"role": "user", "content": content}


async def ask(
    service: Service, messages: Any = "hello", headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    given = messages if isinstance(messages, list) else [user(messages)]
    body = {"model": "tiny", "max_tokens": 200, "messages": given, **fields}
    return await service.http.post("/v1/messages", json=body, headers=headers)


def whole(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()
    types.Message.model_validate(message, strict=True)
    return message


def stream(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events, after checking that they have the official client's types and the official order."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\n")
    events = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event, strict=True)
        events.append(event)
    return events


def names(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events and of deltas; consecutive equal deltas appear once."""
    found: list[str] = []
    for event in events:
        name = event["delta"]["type"] if event["type"] == "content_block_delta" else event["type"]
        if not (name.endswith("_delta") and found and found[-1] == name):
            found.append(name)
    return found


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client assembles from a stream."""
    message = dict(events[0]["message"])
    blocks: list[dict[str, Any]] = []
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                (name, text), *_ = ((key, value) for key, value in event["delta"].items() if key != "type")
                name = "json" if name == "partial_json" else name
                blocks[-1][name] += text
            case "content_block_stop":
                assert event["index"] == len(blocks) - 1
                given = blocks[-1].pop("json")
                if given:
                    blocks[-1]["input"] = json.loads(given)
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message | {"content": blocks}


BLOCK = ["content_block_start", "content_block_stop"]


def block(*deltas: str) -> list[str]:
    return [BLOCK[0], *deltas, BLOCK[1]]
