"""The process of one gateway: its port, its place in the directory, and its end.

SERVING ──drain──> ANNOUNCED   /health is 503, requests are taken     drain_s
                       └─────> CLOSING   the port is closed (shared_port.py), open answers go on     drain_timeout_s
                                  └────> ENDED
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import ray
import uvicorn
from fastapi import FastAPI
from ray.actor import ActorHandle

from baton.cluster.client import ZmqEngineClient
from baton.cluster.contracts import GatewayRecord, Reach
from baton.cluster.gateway.app import create_app
from baton.cluster.gateway.bodies.service import BodyService
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.cluster.gateway.middleware import Drain
from baton.cluster.gateway.model import ServedModel
from baton.cluster.gateway.tracing import RequestSpans
from baton.cluster.logs import configure
from baton.cluster.membership.contact import DirectoryWatch, HeartbeatThread
from baton.cluster.membership.liveness import LifeSocket
from baton.cluster.spec import FleetSpec, load_spec
from baton.engine.net.curve import ClusterKey
from baton.engine.net.endpoints import socket_family

from .acceptor import Acceptor
from .http_protocol import GuardedHttpProtocol, Refused, uncounted
from .open_files import Descriptors, raise_limit
from .refusals import Refusals

logger = logging.getLogger(__name__)

REPORT_S = 1.0  # between reports to the autoscaler
KEEP_ALIVE_S = 65  # above what load balancers use, so that they close idle connections, not we


class HttpServer:
    """An application on a listening socket, until it is drained."""

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
        """`refused`: see `GuardedHttpProtocol`."""
        self._drain, self._drain_s = drain, drain_s
        protocol = functools.partial(GuardedHttpProtocol, refused=refused, max_descriptor=descriptors.served)
        config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], protocol),
            ws="none",
            lifespan="off",
            log_config=None,  # uvicorn's own would close every handler of this process, Serve's among them
            log_level="error",  # what clients send wrong is told in a line of ours
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
        )
        self._server = _Server(config, descriptors)
        self._serving: asyncio.Task[None] | None = None

    def start(self, listener: socket.socket) -> None:
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    @property
    def has_ended(self) -> bool:
        return self._serving is not None and self._serving.done()

    async def ended(self) -> None:
        """Returns when it serves no more. Raises what ended it."""
        assert self._serving is not None, "start comes first"
        await asyncio.shield(self._serving)

    async def drain(self) -> None:
        """Returns when the last answer has ended, or `drain_timeout_s` after the port was closed."""
        if not self._drain.has_begun:
            self._drain.begin()
            await asyncio.sleep(self._drain_s)
            self._server.should_exit = True
        await self.ended()


class _Server(uvicorn.Server):
    """uvicorn's server, which is given connections instead of listeners."""

    def __init__(self, config: uvicorn.Config, descriptors: Descriptors) -> None:
        super().__init__(config)
        self._descriptors = descriptors
        self._acceptors: list[Acceptor] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """What signals mean is for whoever runs the process to say."""
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


@dataclass(frozen=True)
class GatewayLaunch:
    """Everything that a process needs to become a gateway."""

    app: str
    args: dict[str, Any]
    reach: Reach
    node_id: str
    node_ip: str
    port: int


class GatewayServer:
    """Registers, connects to the engines in reach, and serves. `drain` ends it."""

    def __init__(self, launch: GatewayLaunch, *, share_port: bool, actor: ActorHandle | None = None) -> None:
        """`actor` where the process is no Serve replica: the directory ends it with the application.

        Raises `OSError` where the port is another program's, `InvalidSpec` for an application that cannot work,
        `TraceExporterError` where the environment asks for traces that nothing can send.
        """
        self._spec = load_spec(launch.args)
        self._directory = DirectoryWatch(launch.app)
        self._actor = actor
        self._reach = launch.reach
        self._listener = listen(self._spec.gateway.host, launch.port, share=share_port)
        self._life = LifeSocket(launch.node_ip)
        self.record = GatewayRecord(
            identity=f"gateway-{secrets.token_hex(6)}",
            node_id=launch.node_id,
            node_ip=launch.node_ip,
            pid=os.getpid(),
            host=self._spec.gateway.host,
            port=launch.port,
            reach=launch.reach,
            application=digest(launch.args),
            life_address=self._life.address,
            scaling=self._spec.scale_plan,
        )
        configure(self._spec.logging, "gateway", self.record.identity)
        self._heartbeats = HeartbeatThread(launch.app, self.record.identity, self._register)
        self._spans = RequestSpans.from_environment(self.record.identity)

    async def start(self) -> FastAPI:
        """Return the application that it serves from now on. Raises `InvalidKeys`."""
        key = await self._directory.call("cluster_key", self._spec.logging)
        await self._register(self._directory)  # before any engine hears of it
        self._heartbeats.start()  # what follows may take longer than the directory waits for one
        try:
            app = await self._open(key)
            self.record = msgspec.structs.replace(self.record, is_serving=True)
            await self._register(self._directory)
            return app
        except BaseException:
            await self._heartbeats.close()
            raise

    async def _open(self, key: ClusterKey) -> FastAPI:
        spec, identity = self._spec, self.record.identity
        settings, drain = spec.gateway.settings(identity), Drain()
        silence_s = settings.engine_silence_s
        self._client = ZmqEngineClient(self._directory, key, identity, self._reach, silence_s=silence_s)
        await self._client.start()
        model = await asyncio.to_thread(_served_model, spec)
        client = self._client
        self._metrics = GatewayMetrics(model.model_id, client.engines, client.listed, client.counters)
        self._bodies = BodyService(model, settings, self._metrics)
        await self._bodies.processes.start()
        app = create_app(
            self._client,
            model,
            settings,
            drain,
            self._metrics,
            self._bodies,
            spans=self._spans,
            scales_from_zero=spec.scales_from_zero,
        )
        self._http = HttpServer(
            app,
            drain,
            drain_s=settings.drain_s,
            drain_timeout_s=settings.drain_timeout_s,
            refused=Refusals(self._metrics),
            descriptors=raise_limit(settings.max_inflight_requests),
        )
        self._http.start(self._listener)
        self._reports = asyncio.create_task(self._report()) if self.record.scaling else None
        return app

    async def _report(self) -> None:
        """Tells the autoscaler what this gateway is given to do."""
        while True:
            with contextlib.suppress(ray.exceptions.RayError):  # the next report says all that this one did
                await self._directory.call("report_gateway", self.record.identity, self._metrics.load())
            await asyncio.sleep(REPORT_S)

    def check(self) -> None:
        """Raises `RuntimeError` where the gateway does not serve any more, or soon nobody will know of it."""
        if self._http.has_ended:
            raise RuntimeError(f"the HTTP server of {self.record.identity} has ended")
        self._heartbeats.check()

    async def ended(self) -> None:
        """Returns when its port is served no more. Raises what ended it."""
        await self._http.ended()

    async def drain(self) -> None:
        """Ends it in order. Once it returns, nobody lists it."""
        await self._http.drain()
        await self._heartbeats.close()
        if self._reports is not None:
            self._reports.cancel()
        await self._client.close()
        self._bodies.processes.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        with contextlib.suppress(ray.exceptions.RayError):  # heartbeats that end say the same, only later
            await self._directory.call("leave", self.record.identity)
        self._life.close()

    async def _register(self, directory: DirectoryWatch) -> None:
        await directory.call("register_gateway", self.record, self._actor)


def digest(args: Mapping[str, Any]) -> str:
    """Equal where two gateways were started with the same arguments."""
    return hashlib.blake2b(msgspec.json.encode(args, order="sorted"), digest_size=8).hexdigest()


def listen(host: str, port: int, *, share: bool) -> socket.socket:
    """A socket on a port, which with `share` several gateways of a machine may have. `::` is also every IPv4 address.

    Raises `OSError` where it is another program's.
    """
    family = socket_family(host)
    # The protocol is named, or asyncio would let each token wait for the client's word on the one before.
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


def _served_model(spec: FleetSpec) -> ServedModel:
    longest = spec.engine_config(next(iter(spec.fleets.present))).max_model_len
    return ServedModel.from_folder(spec.model, model_id=spec.served_model_id, max_model_len=longest)
