"""A gateway as a replica of a Serve deployment, with load balancing `internal`: each gateway reaches every engine.

It listens at its own port, which gateways on one machine share: the kernel spreads connections over them
(SO_REUSEPORT). If Serve's proxy runs, the gateway also answers behind it.

Serve constructs the replica and then calls `reconfigure` with the deployment's `user_config`, and again whenever that
changes. The gateway starts in the first call, so API keys in `user_config` are valid before its port opens.

Other Serve applications can use the HTTP API without HTTP, by calls through a handle:

    gateway = serve.get_app_handle("main")
    answer = await gateway.chat.remote({"messages": [{"role": "user", "content": "Hello"}]})
    async for chunk in gateway.options(stream=True).stream_chat.remote({"messages": [...]}):
        ...

A call takes the body of the HTTP request of that name, and returns its answer, or yields the parsed events of its
stream. It passes through the same middleware: keys, limits, metrics and logs treat it like any other request.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import msgspec
import ray
from fastapi import FastAPI
from ray import serve
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.cluster.contracts import Reach

from .gateway_server import GatewayLaunch, GatewayPlacement, GatewayServer

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"

app: FastAPI | None = None  # of the gateway in this process


def _app_of_this_process() -> FastAPI:
    assert app is not None, "Serve sends no request before the gateway has started"
    return app


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    await _app_of_this_process()(scope, receive, send)


def app_behind_proxy() -> Starlette:
    """Return the application behind Serve's proxy. Serve asks for it before the gateway has started."""
    return Starlette(routes=[Mount("/", _answer)])


@serve.ingress(app_behind_proxy)
class GatewayReplica:
    """Serve's replica of one gateway."""

    async def __init__(self, args: dict[str, Any], engines: list[Any]) -> None:  # type: ignore[misc]  # Serve awaits constructors
        """`engines` are handles of the fleets' deployments: as arguments, they make Serve deploy the fleets, too."""
        self._launch = GatewayLaunch(
            app=serve.get_replica_context().app_name,
            args=args,
            placement=GatewayPlacement(
                Reach(), ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
            ),
        )
        self._server: GatewayServer | None = None

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Start the gateway, or change the settings of a running one: see `GatewayServer.reconfigure`.

        Raises `InvalidSpec` for invalid settings at the start. Raises `MustRestart` if a running gateway cannot change
        a setting: Serve then ends this replica in order, and starts another one.
        """
        global app
        if self._server is not None:
            await self._server.reconfigure(user_config)
            return
        server = GatewayServer(dataclasses.replace(self._launch, user_config=user_config), share_port=True)
        app = await server.start()
        self._server = server

    async def check_health(self) -> None:
        """Answer Serve's health check.

        Raises if the gateway's port is no longer served, or its heartbeats have ended.
        """
        if self._server is not None:
            self._server.check()

    async def chat(self, body: Mapping[str, Any], api_key: str = "") -> dict[str, Any]:
        """Answer as POST /v1/chat/completions does. Raises `CallFailed`."""
        return await call(_app_of_this_process(), CHAT, body, api_key)

    async def completions(self, body: Mapping[str, Any], api_key: str = "") -> dict[str, Any]:
        """Answer as POST /v1/completions does. Raises `CallFailed`."""
        return await call(_app_of_this_process(), COMPLETIONS, body, api_key)

    async def responses(self, body: Mapping[str, Any], api_key: str = "") -> dict[str, Any]:
        """Answer as POST /v1/responses does. Raises `CallFailed`."""
        return await call(_app_of_this_process(), RESPONSES, body, api_key)

    async def messages(self, body: Mapping[str, Any], api_key: str = "") -> dict[str, Any]:
        """Answer as POST /v1/messages does. Raises `CallFailed`."""
        return await call(_app_of_this_process(), MESSAGES, body, api_key)

    # Serve streams only from methods that are async generators themselves; it refuses a generator that one returns.

    async def stream_chat(self, body: Mapping[str, Any], api_key: str = "") -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a streamed `chat`. Raises `CallFailed`."""
        async with contextlib.aclosing(stream(_app_of_this_process(), CHAT, body, api_key)) as events:
            async for event in events:
                yield event

    async def stream_completions(self, body: Mapping[str, Any], api_key: str = "") -> AsyncIterator[dict[str, Any]]:
        """Yield the events of streamed `completions`. Raises `CallFailed`."""
        async with contextlib.aclosing(stream(_app_of_this_process(), COMPLETIONS, body, api_key)) as events:
            async for event in events:
                yield event

    async def stream_responses(self, body: Mapping[str, Any], api_key: str = "") -> AsyncIterator[dict[str, Any]]:
        """Yield the events of streamed `responses`. Raises `CallFailed`."""
        async with contextlib.aclosing(stream(_app_of_this_process(), RESPONSES, body, api_key)) as events:
            async for event in events:
                yield event

    async def stream_messages(self, body: Mapping[str, Any], api_key: str = "") -> AsyncIterator[dict[str, Any]]:
        """Yield the events of streamed `messages`. Raises `CallFailed`."""
        async with contextlib.aclosing(stream(_app_of_this_process(), MESSAGES, body, api_key)) as events:
            async for event in events:
                yield event

    async def __del__(self) -> None:
        if self._server is not None:
            await self._server.drain()


DONE = b"[DONE]"


class CallFailed(Exception):
    """A call that was refused or failed: the HTTP status (0 if a stream broke off) and the `error` object."""

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
    """Yield the data of each event. Raises `CallFailed`, also for an error in the middle of the stream."""
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
                if decoded.get("type") == "response.failed":
                    raise CallFailed(0, decoded["response"]["error"])
                yield decoded
    if status != 200:
        raise CallFailed(status, msgspec.json.decode(rest)["error"])


async def _exchange(app: ASGIApp, path: str, body: Mapping[str, Any], api_key: str) -> AsyncGenerator[Message, None]:
    """Send one request to the application, and yield its messages. Closing this acts like a client that disconnects."""
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
        await task  # raises the error that ended it, if any
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
