"""The process of one gateway: it registers with the directory, connects to engines, serves HTTP, and drains.

SERVING ──drain──> ANNOUNCED   /health answers 503, requests are accepted     drain_s
                       └─────> CLOSING   the port is closed (acceptor.py), open answers continue     drain_timeout_s
                                  └────> ENDED

While it serves, `reconfigure` changes its settings: all given ones, or none if one of them is invalid.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray
from fastapi import FastAPI
from ray.actor import ActorHandle

from baton.cluster.contracts import EngineTrace, GatewayRecord, LoadBalancing, Reach
from baton.cluster.engine_client import ZmqEngineClient
from baton.cluster.gateway.api.body_service import BodyService
from baton.cluster.gateway.api_keys import InvalidKeys
from baton.cluster.gateway.app import ApplicationAccess, create_app, reconfigure_app
from baton.cluster.gateway.errors import bad_request, no_directory
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.cluster.gateway.middleware import Drain
from baton.cluster.gateway.model import ServedModel
from baton.cluster.gateway.tracing import RequestSpans
from baton.cluster.logs import configure
from baton.cluster.membership.directory_client import DirectoryClient, HeartbeatThread
from baton.cluster.membership.member_probe import ProbeSocket
from baton.cluster.membership.members import NoSuchRank
from baton.cluster.process_metrics import ApplicationMetrics, MetricsExporter, collect
from baton.cluster.spec import FleetSpec, InvalidSpec, load_spec, with_user_config
from baton.engine.hf_config.hub import Files
from baton.engine.net.curve import ClusterKey

from .http_server import HttpServer, RefusalCounter, listen, raise_descriptor_limit

logger = logging.getLogger(__name__)

REPORT_S = 1.0  # between two reports to the autoscaler


@dataclass(frozen=True)
class GatewayPlacement:
    """The machine of a gateway, and the engines that it reaches: all, those of the machine, or one rank."""

    reach: Reach
    node_id: str
    node_ip: str

    @property
    def name(self) -> str:
        rank = f"-rank-{self.reach.rank}" if self.reach.mode is LoadBalancing.EXTERNAL else ""
        return f"{self.node_id}{rank}"


@dataclass(frozen=True)
class GatewayLaunch:
    """The settings with which a process becomes a gateway."""

    app: str
    args: dict[str, Any]
    placement: GatewayPlacement
    port: int = 0  # 0: that in the settings
    user_config: Mapping[str, Any] = field(default_factory=dict)  # an argument of `with_user_config`

    def spec(self, user_config: Mapping[str, Any]) -> FleetSpec:
        """Return the application with this `user_config`.

        Raises `InvalidSpec`, also for an invalid file of API keys.
        """
        spec = load_spec(with_user_config(self.args, user_config))
        spec.gateway.keys()
        return spec


class MustRestart(RuntimeError):
    """Settings have changed that a running gateway cannot change: a new gateway has to take its place."""


class DirectoryOperator:
    """The `Operator` of gateways on Ray, which calls the directory."""

    def __init__(self, directory: DirectoryClient) -> None:
        self._directory = directory

    async def drain(self, rank: int) -> list[int]:
        with _directory_errors():
            ranks: list[int] = await self._directory.call("drain_rank", rank)
            return ranks

    async def start_profile(self) -> list[EngineTrace]:
        with _directory_errors():
            return await self._directory.profile(start=True)

    async def stop_profile(self) -> list[EngineTrace]:
        with _directory_errors():
            return await self._directory.profile(start=False)


@contextlib.contextmanager
def _directory_errors() -> Iterator[None]:
    """Raise errors of the directory, or its silence, as `ApiError`."""
    try:
        yield
    except NoSuchRank as error:  # Ray raises a subclass of it, with the traceback in its text
        message = str(error).splitlines()[-1]
        raise bad_request("rank", f"'rank': {message.rpartition('NoSuchRank: ')[2]}.", "unknown_rank") from None
    except ray.exceptions.RayError as error:
        raise no_directory(f"{type(error).__name__}: {error}") from None


class GatewayServer:
    """Registers, connects to the engines that it reaches, and serves. `drain` ends it."""

    def __init__(self, launch: GatewayLaunch, *, share_port: bool, actor: ActorHandle | None = None) -> None:
        """`actor` is given if the process is no Serve replica, so that the directory can end it with the application.

        Raises `OSError` if another program has the port, `InvalidSpec` for settings that cannot work, and
        `TraceExporterError` if the environment asks for traces with an exporter that cannot send them.
        """
        self._launch = launch
        self._spec = launch.spec(launch.user_config)
        self._changing = asyncio.Lock()
        self._directory = DirectoryClient(launch.app)
        self._actor = actor
        self._placement = placement = launch.placement
        port = launch.port or self._spec.gateway.port
        self._listener = listen(self._spec.gateway.host, port, share=share_port)
        self._life = ProbeSocket(placement.node_ip)
        self.record = GatewayRecord(
            identity=f"gateway-{secrets.token_hex(6)}",
            node_id=placement.node_id,
            node_ip=placement.node_ip,
            pid=os.getpid(),
            host=self._spec.gateway.host,
            port=port,
            reach=placement.reach,
            application=digest(launch.args, self._spec),
            life_address=self._life.address,
            scaling=self._spec.scale_plan,
        )
        configure(self._spec.logging, "gateway", self.record.identity)
        self._heartbeats = HeartbeatThread(launch.app, self.record.identity, self._register)
        self._spans = RequestSpans.from_environment(self.record.identity)

    async def start(self) -> FastAPI:
        """Serve, and return the HTTP application. Raises `InvalidKeys`."""
        key = await self._directory.call("cluster_key", self._spec.logging)
        await self._register(self._directory)  # before the gateway connects to an engine
        self._heartbeats.start()  # early, since the start may take longer than the directory waits for a heartbeat
        try:
            app = await self._open(key)
            self.record = msgspec.structs.replace(self.record, is_serving=True, metrics_address=self._exporter.address)
            await self._register(self._directory)
            return app
        except BaseException:
            await self._heartbeats.close()
            raise

    async def _open(self, key: ClusterKey) -> FastAPI:
        spec, identity = self._spec, self.record.identity
        settings, drain = spec.gateway.settings(identity), Drain()
        self._client = ZmqEngineClient(
            self._directory,
            key,
            identity,
            self._placement.reach,
            heartbeat_timeout_s=settings.engine_heartbeat_timeout_s,
            queue=settings.queue_limits.bound,
        )
        await self._client.start()
        model = await asyncio.to_thread(served_model, spec)
        client = self._client
        self._metrics = GatewayMetrics(model.model_id, client.engines, client.counters)
        self._export_metrics(key)
        self._bodies = BodyService(model, settings, self._metrics)
        await self._bodies.processes.start()
        self._app = create_app(
            self._client,
            model,
            settings,
            drain,
            self._metrics,
            self._bodies,
            spans=self._spans,
            application=ApplicationAccess(
                scrape=self._scraped.render,
                operator=DirectoryOperator(self._directory),
                load_balancing=self._placement.reach.mode,
                scales_from_zero=spec.scales_from_zero,
            ),
        )
        self._http = HttpServer(
            self._app,
            drain,
            drain_s=settings.drain_s,
            drain_timeout_s=settings.drain_timeout_s,
            refused=RefusalCounter(self._metrics),
            descriptors=raise_descriptor_limit(settings.max_inflight_requests),
        )
        self._http.start(self._listener)
        self._reports = asyncio.create_task(self._report()) if self.record.scaling else None
        return self._app

    def _export_metrics(self, key: ClusterKey) -> None:
        """Begin to answer other gateways' scrapes, and prepare to scrape all processes."""
        registry, labels = self._metrics.registry, {"gateway": self.record.identity}
        self._exporter = MetricsExporter(registry, host=self.record.node_ip, key=key, labels=labels)
        self._exporter.start()
        self._scraped = ApplicationMetrics(
            lambda names: collect(registry, labels, names),
            identity=self.record.identity,
            node_id=self.record.node_id,
            listed=self._client.listed,
            key=key,
        )

    async def _report(self) -> None:
        """Report this gateway's load to the autoscaler, and new latency targets if they have changed."""
        told = self.record.scaling
        while True:
            with contextlib.suppress(ray.exceptions.RayError):  # the next report contains all that this one does
                if told != (plan := self.record.scaling):
                    await self._register(self._directory)
                    told = plan
                await self._directory.call("report_gateway", self.record.identity, self._metrics.load())
            await asyncio.sleep(REPORT_S)

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Apply other settings. See `reconfigure_app` for the effect on requests that have begun.

        If one setting is invalid, all are refused: the log names the reason, and a metric shows it. Raises
        `MustRestart` if one cannot change while the gateway runs; then nothing has changed either.
        """
        async with self._changing:
            try:
                spec = await asyncio.to_thread(self._launch.spec, user_config)
                if kept := [
                    name for name, value in spec.gateway.fixed.items() if value != self._spec.gateway.fixed[name]
                ]:
                    raise MustRestart(f"gateways must restart to change {', '.join(kept)}")
                self._apply(spec)
            except (InvalidSpec, InvalidKeys) as error:
                self._metrics.settings_refused.set(1)
                logger.error("new settings were refused, the previous ones stay in effect: %s", error)
            else:
                self._metrics.settings_refused.set(0)

    def _apply(self, spec: FleetSpec) -> None:
        """Apply the settings of `spec`. Raises `InvalidKeys`; then nothing has changed."""
        settings = spec.gateway.settings(self.record.identity)
        reconfigure_app(self._app, settings)
        self._client.queue = settings.queue_limits.bound
        self._http.reconfigure(settings.drain_s, settings.drain_timeout_s)
        if settings.max_inflight_requests > self._spec.gateway.max_inflight_requests:
            raise_descriptor_limit(settings.max_inflight_requests)  # warns if fewer connections are possible
        self.record = msgspec.structs.replace(self.record, scaling=spec.scale_plan)
        if spec.gateway != self._spec.gateway or spec.autoscaling != self._spec.autoscaling:
            logger.info("new settings are in effect: %s", ", ".join(_changed(self._spec, spec)))
        self._spec = spec

    def check(self) -> None:
        """Check that the gateway serves and sends heartbeats. Raises `RuntimeError` if it does not."""
        if self._http.has_ended:
            raise RuntimeError(f"the HTTP server of {self.record.identity} has ended")
        self._heartbeats.check()

    async def ended(self) -> None:
        """Wait until its port is no longer served. Raises the error that was the cause."""
        await self._http.ended()

    async def drain(self) -> None:
        """End in order. When this returns, the directory no longer lists the gateway."""
        await self._http.drain()
        await self._heartbeats.close()
        if self._reports is not None:
            self._reports.cancel()
        await self._client.close()
        self._bodies.processes.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        with contextlib.suppress(ray.exceptions.RayError):  # missing heartbeats would say the same, only later
            await self._directory.call("leave", self.record.identity)
        await self._exporter.close()  # only now: while the gateway is listed, scrapes ask it
        self._scraped.close()
        self._life.close()

    async def _register(self, directory: DirectoryClient) -> None:
        await directory.call("register_gateway", self.record, self._actor)


def digest(args: Mapping[str, Any], spec: FleetSpec) -> str:
    """Return a digest of the settings that a gateway cannot change: the arguments, and its fixed settings."""
    kept = [args, spec.gateway.fixed]
    return hashlib.blake2b(msgspec.json.encode(kept, order="sorted"), digest_size=8).hexdigest()


def _changed(old: FleetSpec, new: FleetSpec) -> list[str]:
    """Return the names of the settings that differ; not their values, which may be API keys."""
    names = [f"gateway.{name}" for name in type(new.gateway).model_fields if _differ(old.gateway, new.gateway, name)]
    if new.autoscaling is not None:
        fields = type(new.autoscaling).model_fields
        names += [f"autoscaling.{name}" for name in fields if _differ(old.autoscaling, new.autoscaling, name)]
    return names


def _differ(old: object, new: object, name: str) -> bool:
    return bool(getattr(old, name) != getattr(new, name))


def served_model(spec: FleetSpec) -> ServedModel:
    """Read the part of the model that a gateway needs. If it is a name on the Hub, download that first."""
    longest = spec.engine_config(next(iter(spec.fleets.present))).max_model_len
    return ServedModel.from_folder(spec.model_folder(Files.TEXT), model_id=spec.served_model_id, max_model_len=longest)
