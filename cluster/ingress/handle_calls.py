"""The HTTP API without HTTP: methods that other Serve applications call through a handle of the gateways.

    gateway = serve.get_app_handle("main")
    answer = await gateway.chat.remote({"messages": [{"role": "user", "content": "Hello"}]})
    async for chunk in gateway.options(stream=True).stream_chat.remote({"messages": [...]}):
        ...

A call takes the body of the HTTP request of that name and returns its answer, or yields the events of its stream,
parsed. It passes the same middleware: keys, limits, metrics and logs treat it as any other request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
DONE = b"[DONE]"


class CallFailed(Exception):
    """The gateway refused a call, or it failed: the HTTP status (0 where a stream broke off) and the `error` object."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(status, error)
        self.status, self.error = status, error

    def __str__(self) -> str:
        return f"{self.status}: {self.error.get('message', self.error)}"


async def call(app: ASGIApp, path: str, body: Mapping[str, Any], api_key: str = "") -> dict[str, Any]:
    """Return the whole answer. Raises `CallFailed`."""
    async with contextlib.aclosing(_exchange(app, path, dict(body) | {"stream": False}, api_key)) as messages:
        status, parts = 0, []
        async for message in messages:
            status = message.get("status", status)
            parts.append(message.get("body", b""))
    answer: dict[str, Any] = msgspec.json.decode(b"".join(parts))
    if status != 200:
        raise CallFailed(status, answer["error"])
    return answer


async def stream(
    app: ASGIApp, path: str, body: Mapping[str, Any], api_key: str = ""
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the data of each event. Raises `CallFailed`, also for an error that comes as an event."""
    async with contextlib.aclosing(_exchange(app, path, dict(body) | {"stream": True}, api_key)) as messages:
        status, rest = 0, b""
        async for message in messages:
            status = message.get("status", status)
            *events, rest = (rest + message.get("body", b"")).split(b"\n\n")
            for event in events:
                data = next((line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")), DONE)
                if data == DONE:
                    continue
                decoded: dict[str, Any] = msgspec.json.decode(data)
                if decoded.keys() == {"error"} or decoded.get("type") == "error":
                    raise CallFailed(0, decoded["error"])
                yield decoded
    if status != 200:
        raise CallFailed(status, msgspec.json.decode(rest)["error"])


async def _exchange(app: ASGIApp, path: str, body: Mapping[str, Any], api_key: str) -> AsyncGenerator[Message, None]:
    """Send one request to the application and yield what it sends back. Closing this is a client that leaves."""
    content = msgspec.json.encode(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    if api_key:
        headers.append((b"authorization", b"Bearer " + api_key.encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    task = asyncio.ensure_future(app(scope, _receive_from(content, gone), sent.put))
    task.add_done_callback(lambda _: sent.put_nowait(None))
    try:
        while (message := await sent.get()) is not None:
            yield message
        await task  # which raises what ended it
    finally:
        gone.set()
        await asyncio.wait([task])


def _receive_from(content: bytes, gone: asyncio.Event) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive
