"""One gateway: a Serve deployment's replica that answers HTTP on its own port, and behind Serve's proxy where one runs.

Several gateways of a machine share the port: the kernel spreads connections over them (SO_REUSEPORT).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import socket
from typing import Any

import ray
import uvicorn
from fastapi import FastAPI
from ray import serve

from .client import ZmqEngineClient
from .directory import DirectoryWatch, stay_registered
from .gateway.app import create_app
from .gateway.model import ServedModel
from .http_protocol import GuardedHttpProtocol
from .spec import FleetSpec, load_spec

logger = logging.getLogger(__name__)

DRAIN_S = 3  # for open streams when the gateway ends; Serve ends it after `SHUTDOWN_S` anyway
KEEP_ALIVE_S = 65  # above what load balancers use, so that they close idle connections, not we

_app: FastAPI | None = None  # of this process; Serve asks for it after the constructor


def _app_of_this_process() -> FastAPI:
    assert _app is not None, "Serve asks for the app once the gateway is constructed"
    return _app


@serve.ingress(_app_of_this_process)
class GatewayReplica:
    """`engines` are the handles of the fleets' deployments: Serve deploys what an application's root is given."""

    async def __init__(self, args: dict[str, Any], engines: list[Any]) -> None:  # type: ignore[misc]  # Serve awaits constructors
        global _app
        spec = load_spec(args)
        context = serve.get_replica_context()
        self._identity = f"gateway-{context.replica_id.unique_id}-{secrets.token_hex(4)}"
        self._directory = DirectoryWatch(context.app_name)
        await self._directory.call("register_gateway", self._identity)  # before any engine hears of it
        self._client = ZmqEngineClient(self._directory, await self._directory.call("cluster_key"), self._identity)
        await self._client.start()
        model = await asyncio.to_thread(_served_model, spec)
        _app = create_app(self._client, model, spec.gateway.settings(self._identity))
        listener = listen(spec.gateway.host, spec.gateway.port)
        self._server = uvicorn.Server(
            uvicorn.Config(
                _app,
                http=GuardedHttpProtocol,
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=DRAIN_S,
            )
        )
        register = functools.partial(self._directory.call, "register_gateway", self._identity)
        self._http = asyncio.create_task(self._server.serve(sockets=[listener]))
        self._heart = asyncio.create_task(stay_registered(self._directory, self._identity, None, register))

    async def check_health(self) -> None:
        """Serve asks. Raises where the gateway's own port is not served any more."""
        if self._http.done():
            raise RuntimeError(f"the HTTP server of {self._identity} has ended")

    async def __del__(self) -> None:
        if hasattr(self, "_heart"):
            self._heart.cancel()
            self._server.should_exit = True
            await asyncio.gather(self._http, return_exceptions=True)
            await self._client.close()
            with contextlib.suppress(ray.exceptions.RayError):  # heartbeats that end say the same, only later
                await self._directory.call("leave", self._identity)


def listen(host: str, port: int) -> socket.socket:
    """A socket on a port that several gateways of one machine may share. Raises `OSError` where it is another's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"port {port} on {host} is taken by another program: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def _served_model(spec: FleetSpec) -> ServedModel:
    longest = spec.engine_config(next(iter(spec.fleets.present))).max_model_len
    return ServedModel.from_folder(spec.model, model_id=spec.served_model_id, max_model_len=longest)
