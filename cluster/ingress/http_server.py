"""The HTTP server of one gateway: its socket, the number of open connections, and its refusals.

Requests that are refused before the application sees them are counted and logged here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from baton.cluster.gateway.errors import ApiError
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.cluster.gateway.middleware import Drain
from baton.engine.net.sockets import socket_family

from .acceptor import Acceptor
from .http_protocol import GuardedHttpProtocol, Refused, uncounted

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 65  # longer than load balancers keep idle connections, so that they close first
MOST_RESERVED = 256  # descriptors for engines, Ray, the log, and connections accepted only to be refused
ROUTE = "other"  # label under which the application counts unknown paths
REFUSALS_LOG_S = 10.0  # between log lines about refused connections


@dataclass(frozen=True)
class Descriptors:
    """The highest file descriptor numbers that connections may have."""

    served: int = sys.maxsize
    accepted: int = sys.maxsize  # connections between `served` and this are accepted in order to be refused


class HttpServer:
    """Serves an ASGI application on a listening socket until it is drained."""

    def __init__(
        self,
        app: FastAPI,
        drain: Drain,
        *,
        drain_s: float,
        drain_timeout_s: float,
        refused: Refused = uncounted,
        descriptors: Descriptors = Descriptors(),
    ) -> None:
        """`refused` is called as in `GuardedHttpProtocol`."""
        self._drain, self.drain_s = drain, drain_s
        protocol = functools.partial(GuardedHttpProtocol, refused=refused, max_descriptor=descriptors.served)
        config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], protocol),
            ws="none",
            lifespan="off",
            log_config=None,  # uvicorn's own would close all handlers of this process, including Serve's
            log_level="error",  # `RefusalCounter` logs malformed requests
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_whole_seconds(drain_timeout_s),
        )
        self._server = _Server(config, descriptors)
        self._serving: asyncio.Task[None] | None = None

    def reconfigure(self, drain_s: float, drain_timeout_s: float) -> None:
        """Use other times for the next drain."""
        self.drain_s = drain_s
        self._server.config.timeout_graceful_shutdown = _whole_seconds(drain_timeout_s)

    def start(self, listener: socket.socket) -> None:
        gc.collect()
        gc.freeze()  # loaded objects stay, and collecting them again took tens of milliseconds during long answers
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    @property
    def drain_timeout_s(self) -> int | None:
        """The longest time that a drain waits for answers, in whole seconds."""
        return self._server.config.timeout_graceful_shutdown

    @property
    def has_started(self) -> bool:
        """True once connections are accepted."""
        return self._server.started

    @property
    def has_ended(self) -> bool:
        return self._serving is not None and self._serving.done()

    async def ended(self) -> None:
        """Wait until the server has ended. Raises the error that was the cause."""
        assert self._serving is not None, "start comes first"
        await asyncio.shield(self._serving)

    async def drain(self) -> None:
        """Close the port, and return when the last answer is complete, after at most `drain_timeout_s`."""
        if not self._drain.has_begun:
            self._drain.begin()
            await asyncio.sleep(self.drain_s)
            self._server.should_exit = True
        await self.ended()


def _whole_seconds(seconds: float) -> int:
    return max(1, round(seconds))


class _Server(uvicorn.Server):
    """uvicorn's server, with Baton's acceptors instead of its own listeners."""

    def __init__(self, config: uvicorn.Config, descriptors: Descriptors) -> None:
        super().__init__(config)
        self._descriptors = descriptors
        self._acceptors: list[Acceptor] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handlers alone: they belong to the process, not to its server."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._acceptors = [Acceptor(each, self._protocol, self._descriptors.accepted) for each in sockets or []]
        for acceptor in self._acceptors:
            acceptor.start()

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        return cast(
            asyncio.Protocol,
            make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state),
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.gather(*(acceptor.close() for acceptor in self._acceptors))
        await super().shutdown([])


class RefusalCounter:
    """Counts and logs requests that the HTTP server refuses before the application sees them."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._unlogged = 0  # connections refused since the last log line
        self._log_s = 0.0

    def __call__(self, error: ApiError, client: str) -> None:
        self._metrics.responses.labels(ROUTE, error.status).inc()
        if error.status != 503:
            logger.info("a request of %s was refused with %d: %s", client, error.status, error.message)
            return
        self._unlogged += 1
        if time.monotonic() >= self._log_s:
            logger.warning(
                "connections refused with 503, the last one of %s: %d. As many are open as this process may have files "
                "(ulimit -n)",
                client,
                self._unlogged,
            )
            self._unlogged, self._log_s = 0, time.monotonic() + REFUSALS_LOG_S


def raise_descriptor_limit(max_inflight_requests: int) -> Descriptors:
    """Raise the process's limit of open files as far as allowed; return the descriptors that connections may have.

    Logs a warning if these are too few for `max_inflight_requests`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    reserved = min(MOST_RESERVED, hard // 4)
    served = hard - 1 - reserved
    connections = served + 1 - len(os.listdir("/proc/self/fd"))
    if connections < max_inflight_requests:
        logger.warning(
            "this process may have %d files open (ulimit -n), so about %d connections, and max_inflight_requests is "
            "%d: further connections are answered with 503. Raise the limit where Ray is started",
            hard,
            max(0, connections),
            max_inflight_requests,
        )
    return Descriptors(served, served + reserved // 2)


def listen(host: str, port: int, *, share: bool) -> socket.socket:
    """Bind a socket to a port. With `share`, several gateways of a machine can use the port. `::` includes IPv4.

    Raises `OSError` if another program has the port.
    """
    family = socket_family(host)
    # IPPROTO_TCP makes asyncio set TCP_NODELAY: otherwise each token would wait for the ACK of the one before.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if share:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # whatever net.ipv6.bindv6only says
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"port {port} on {host} is taken by another program: {error.strerror}") from None
    listener.setblocking(False)
    return listener
