"""A gateway as a replica of a Serve deployment, with `internal` load balancing: each reaches every engine.

It listens at a port of its own, which several on one machine share: the kernel spreads connections over them
(SO_REUSEPORT). It also answers behind Serve's proxy where one runs.

Serve constructs it, and then calls `reconfigure` with the `user_config` of the deployment, and again whenever that
changes. It starts with the first call: its port is not open before API keys in `user_config` hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from baton.cluster.contracts import Reach

from .gateway_server import GatewayLaunch, GatewayServer
from .handle_calls import CHAT, COMPLETIONS, MESSAGES, RESPONSES, call, stream

app: FastAPI | None = None  # of this process


def _app_of_this_process() -> FastAPI:
    assert app is not None, "Serve sends no request before the gateway has started"
    return app


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    await _app_of_this_process()(scope, receive, send)


def app_behind_proxy() -> Starlette:
    """Return what answers behind Serve's proxy, which asks for it before the gateway has started."""
    return Starlette(routes=[Mount("/", _answer)])


@serve.ingress(app_behind_proxy)
class GatewayReplica:
    """Serve's replica of one gateway."""

    async def __init__(self, args: dict[str, Any], engines: list[Any]) -> None:  # type: ignore[misc]  # Serve awaits constructors
        """`engines`: handles of the fleets' deployments, which Serve deploys because they are arguments here."""
        self._launch = GatewayLaunch(
            app=serve.get_replica_context().app_name,
            args=args,
            reach=Reach(),
            node_id=ray.get_runtime_context().get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
        )
        self._server: GatewayServer | None = None

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Start the gateway, or change the settings of one that runs: see `GatewayServer.reconfigure`.

        Raises `InvalidSpec` for wrong settings at the start, and `MustRestart`: Serve then ends this replica in order,
        and starts another one.
        """
        global app
        if self._server is not None:
            await self._server.reconfigure(user_config)
            return
        server = GatewayServer(dataclasses.replace(self._launch, user_config=user_config), share_port=True)
        app = await server.start()
        self._server = server

    async def check_health(self) -> None:
        """Answer Serve. Raises where the gateway's own port is served no more, or its heartbeats have ended."""
        if self._server is not None:
            self._server.check()

    async def chat(self, body: Mapping[str, Any], api_key: str = "") -> dict[str, Any]:
        """Answer as POST /v1/chat/completions does. Raises `CallFailed`. See `handle_calls.py` for all calls."""
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

    # Serve streams what an async generator of the class yields; one that a method returns is refused.

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
