"""The controller of gateways beside engines: one gateway on each node (hybrid) or for each rank (external).

    directory ── snapshots ──> GatewayController ── starts, replaces, ends ──> GatewayActor, one a placement
                               (Serve, one replica)

Serve passes `user_config` to the controller, which passes it on to each gateway. If it changes a setting that a gateway
cannot change while running, the controller replaces the gateways one after the other.

Gateways outlive their controller: when it dies they keep serving, and its successor finds them by name. They end with
the application, or when their placement has not been needed for `UNNEEDED_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.cluster.contracts import DirectorySnapshot, EngineRecord, GatewayRecord, LoadBalancing, Reach
from baton.cluster.logs import configure
from baton.cluster.membership.directory import NAMESPACE
from baton.cluster.membership.directory_client import DirectoryClient, keep_app_alive
from baton.cluster.spec import FleetSpec, InvalidSpec, load_spec, with_user_config

from .gateway_server import GatewayLaunch, GatewayPlacement, GatewayServer, digest

logger = logging.getLogger(__name__)
RETRY_S = 2.0  # between attempts to start a gateway
START_S = 60.0  # for one gateway to start: a machine without capacity for it must not hold up the others
KILLED_S = 5.0  # for Ray to end a process that does not respond
UNLISTED_TIMEOUT_S = 10.0  # a gateway unlisted for so long counts as hanging; Ray reports a dead one at once
UNNEEDED_S = 300.0  # a gateway without a rank for so long is ended; restarted engines return sooner


def gateway_placements(mode: LoadBalancing, engines: Iterable[EngineRecord]) -> dict[str, GatewayPlacement]:
    """Return the placements of all gateways by name, in the order of their ranks."""
    placements: dict[str, GatewayPlacement] = {}
    for engine in engines:
        if engine.role.writes_answers:
            external = mode is LoadBalancing.EXTERNAL
            reach = Reach(mode=mode, rank=engine.rank) if external else Reach(mode=mode, node_id=engine.node_id)
            placement = GatewayPlacement(reach, engine.node_id, engine.node_ip)
            placements.setdefault(placement.name, placement)
    return placements


class PortAllocator:
    """Assigns ports `first`, `first + 1`, ... to the gateways of a machine; all machines use the same ports."""

    def __init__(self, first: int) -> None:
        self.first = first
        self._taken: dict[str, dict[int, str]] = defaultdict(dict)  # for each machine: port -> name of the placement

    def port_of(self, placement: GatewayPlacement) -> int:
        """Return the placement's port, or else assign the lowest free one on its machine."""
        taken = self._taken[placement.node_ip]
        port = next((port for port, name in taken.items() if name == placement.name), None)
        if port is None:
            port = self.first
            while port in taken:
                port += 1
            taken[port] = placement.name
        return port

    def reserve(self, placement: GatewayPlacement, port: int) -> None:
        """Assign the port at which a gateway of an earlier controller listens already."""
        self._taken[placement.node_ip][port] = placement.name

    def release(self, placement: GatewayPlacement) -> None:
        taken = self._taken[placement.node_ip]
        for port in [port for port, name in taken.items() if name == placement.name]:
            del taken[port]


class GatewayActor:
    """One gateway as a Ray actor. `run` returns when it has ended."""

    def __init__(self, launch: GatewayLaunch) -> None:
        self._launch = launch
        self._server: GatewayServer | None = None
        self._starting = asyncio.Lock()
        self._draining = asyncio.Lock()

    async def start(self) -> GatewayRecord:
        """Serve; a second start has no effect. Raises `OSError` if the port is taken."""
        async with self._starting:
            if self._server is None:
                actor = ray.get_runtime_context().current_actor
                server = GatewayServer(self._launch, share_port=False, actor=actor)
                await server.start()
                self._server = server
        return self._server.record

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """See `GatewayServer.reconfigure`."""
        async with self._starting:
            server = self._running
        await server.reconfigure(user_config)

    async def run(self) -> None:
        """Return when the gateway has ended."""
        async with self._starting:  # the directory lists a gateway before it serves, so this can be called early
            server = self._running
        await server.ended()
        async with self._draining:  # a running drain must still call the directory and answer its caller
            return

    async def drain(self) -> None:
        """See `GatewayServer.drain`."""
        async with self._draining:
            await self._running.drain()

    @property
    def _running(self) -> GatewayServer:
        if self._server is None:
            raise RuntimeError("the gateway has not been started")
        return self._server


@dataclass
class RunningGateway:
    """A started gateway, as the controller knows it."""

    actor: ActorHandle
    record: GatewayRecord
    run: asyncio.Future[None]
    needed_at_s: float = field(default_factory=time.monotonic)
    unlisted_at_s: float = math.inf  # when the directory stopped listing it
    user_config: Mapping[str, Any] | None = None  # last one passed to it; None: not by this controller

    def update_listing(self, listed: Container[str], now_s: float) -> None:
        """Note whether a new snapshot of the directory lists the gateway."""
        self.unlisted_at_s = math.inf if self.record.identity in listed else min(self.unlisted_at_s, now_s)

    def has_ended(self, now_s: float) -> bool:
        """Return whether the gateway has ended, or hangs: its process is alive, but sends no heartbeats."""
        return self.run.done() or now_s - self.unlisted_at_s > UNLISTED_TIMEOUT_S


class Action(enum.Enum):
    """The next step at one placement."""

    NOTHING = enum.auto()
    START = enum.auto()
    REPLACE = enum.auto()
    END = enum.auto()
    FORGET = enum.auto()


def decide_action(gateway: RunningGateway | None, *, needed: bool, application: str, now_s: float) -> Action:
    """Decide the next step at a placement. `application` is the digest of the settings that a gateway cannot change."""
    if gateway is None:
        return Action.START if needed else Action.FORGET
    if gateway.record.application != application:
        return Action.REPLACE if needed else Action.END
    return Action.END if now_s - gateway.needed_at_s > UNNEEDED_S else Action.NOTHING


class GatewayController:
    """Serve's deployment that keeps a gateway running at each placement.

    If another program has a gateway's port, only that gateway is affected: its start is retried and logged.
    """

    async def __init__(self, args: dict[str, Any], engines: list[Any]) -> None:  # type: ignore[misc]  # Serve awaits constructors
        """`engines` are handles of the fleets' deployments: as arguments, they make Serve deploy the fleets, too."""
        self._args = args
        self._app = serve.get_replica_context().app_name
        self._tasks: list[asyncio.Task[None]] = []  # empty before the first `reconfigure`
        self._ports = PortAllocator(0)

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Begin to keep gateways with these settings, or apply the settings to running gateways.

        Invalid settings change nothing, except that the first ones raise `InvalidSpec`.
        """
        try:
            spec = await asyncio.to_thread(load_spec, with_user_config(self._args, user_config))
        except InvalidSpec as error:
            if not self._tasks:
                raise
            logger.error("new settings were refused, the previous ones stay in effect: %s", error)
            for gateway in self._gateways.values():  # so that the refusal shows in their metrics, too
                with contextlib.suppress(ray.exceptions.RayError):
                    await gateway.actor.reconfigure.remote(user_config)
            return
        has_begun = bool(self._tasks)
        if spec.gateway.port != self._ports.first:
            self._ports = PortAllocator(spec.gateway.port)
        self._user_config, self._gateway = user_config, spec.gateway
        self._version = digest(self._args, spec)
        if has_begun:
            self._changed.set()
        else:
            await self._begin(spec)

    async def _begin(self, spec: FleetSpec) -> None:
        configure(spec.logging, "gateway-controller", f"gateway-controller-{self._app}")
        self._mode = spec.load_balancing
        self._directory = DirectoryClient(self._app)
        self._gateways: dict[str, RunningGateway] = {}
        self._placements: dict[str, GatewayPlacement] = {}
        self._snapshot = await self._directory.watch(-1)
        self._adopt(self._snapshot)
        self._changed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._reconcile_all()), asyncio.create_task(self._watch())]

    async def check_health(self) -> None:
        """Answer Serve's health check. Raises errors of the controller's own tasks, not those of gateways."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _watch(self) -> None:
        async with keep_app_alive(self._directory):
            while True:
                try:
                    self._snapshot = await self._directory.watch(self._snapshot.version)
                    listed = {record.identity for record in self._snapshot.gateways}
                    for gateway in self._gateways.values():
                        gateway.update_listing(listed, time.monotonic())
                    self._changed.set()
                except ray.exceptions.RayError as error:
                    logger.warning("the directory does not answer, asking again: %s", type(error).__name__)
                    await asyncio.sleep(RETRY_S)

    async def _reconcile_all(self) -> None:
        while True:
            await self._remove_ended()
            needed = gateway_placements(self._mode, self._snapshot.engines)
            self._placements |= needed
            for each in list(self._placements.values()):  # one by one, so that a new version does not end all at once
                await self._reconcile(each, needed=each.name in needed)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), RETRY_S)
            self._changed.clear()

    def _adopt(self, snapshot: DirectorySnapshot) -> None:
        """Take over the gateways of an earlier controller."""
        for record in snapshot.gateways:
            placement = GatewayPlacement(record.reach, record.node_id, record.node_ip)
            try:
                actor = ray.get_actor(self._actor_name(placement), namespace=NAMESPACE)
            except ValueError:
                continue  # its actor has ended meanwhile
            self._placements[placement.name] = placement
            self._ports.reserve(placement, record.port)
            self._gateways[placement.name] = RunningGateway(actor, record, asyncio.ensure_future(actor.run.remote()))

    async def _remove_ended(self) -> None:
        for name, gateway in list(self._gateways.items()):
            if gateway.has_ended(time.monotonic()):
                how = "has ended" if gateway.run.done() else "hangs"
                logger.warning("gateway %s (pid %d) %s", gateway.record.identity, gateway.record.pid, how)
                ray.kill(gateway.actor)  # even if it has ended in order, because its actor still occupies the name
                await asyncio.wait([gateway.run], timeout=KILLED_S)
                if gateway.run.done():  # else try again later: a new actor of this name would be the hanging one
                    del self._gateways[name]

    async def _reconcile(self, placement: GatewayPlacement, *, needed: bool) -> None:
        gateway, now_s = self._gateways.get(placement.name), time.monotonic()
        if gateway is not None and needed:
            gateway.needed_at_s = now_s
        match decide_action(gateway, needed=needed, application=self._version, now_s=now_s):
            case Action.FORGET:
                self._ports.release(placement)
                del self._placements[placement.name]
            case Action.START:
                await self._start(placement)
            case Action.REPLACE if gateway is not None:
                await self._end(gateway)
                await self._start(placement)
            case Action.END if gateway is not None:
                await self._end(gateway)
            case Action.NOTHING if gateway is not None and gateway.user_config != self._user_config:
                await self._configure(gateway)

    async def _configure(self, gateway: RunningGateway) -> None:
        """Pass the newest settings to a gateway. If that fails, it is tried again later."""
        user_config = self._user_config
        try:
            await asyncio.wait_for(gateway.actor.reconfigure.remote(user_config), START_S)
        except (TimeoutError, ray.exceptions.RayError) as error:
            logger.warning("%s has not applied the new settings: %s", gateway.record.identity, type(error).__name__)
        else:
            gateway.user_config = user_config

    def _actor_name(self, placement: GatewayPlacement) -> str:
        return f"baton-gateway:{self._app}:{placement.name}"

    async def _start(self, placement: GatewayPlacement) -> None:
        port, user_config = self._ports.port_of(placement), self._user_config
        launch = GatewayLaunch(self._app, self._args, placement, port=port, user_config=user_config)
        actor_class: Any = ray.remote(GatewayActor)
        actor = actor_class.options(
            name=self._actor_name(placement),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=NodeAffinitySchedulingStrategy(placement.node_id, soft=False),
            num_cpus=self._gateway.num_cpus,
            resources=self._gateway.resources or None,
            max_concurrency=1000,
        ).remote(launch)
        try:
            record = await asyncio.wait_for(actor.start.remote(), START_S)
        except (TimeoutError, ray.exceptions.RayError) as error:
            why = str(error) or f"it has not started within {START_S:g} s"
            logger.error("no gateway at port %d of %s: %s", port, placement.node_ip, why)
            ray.kill(actor)
            return
        logger.info("gateway %s at port %d of %s: %s", record.identity, record.port, record.node_ip, placement.name)
        run = asyncio.ensure_future(actor.run.remote())
        self._gateways[placement.name] = RunningGateway(actor, record, run, user_config=user_config)

    async def _end(self, gateway: RunningGateway) -> None:
        longest_s = self._gateway.drain_s + self._gateway.drain_timeout_s + UNLISTED_TIMEOUT_S
        # A gateway that hangs or has died is killed all the same.
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
            await asyncio.wait_for(gateway.actor.drain.remote(), longest_s)
        ray.kill(gateway.actor)
        self._gateways = {name: other for name, other in self._gateways.items() if other is not gateway}

    async def __del__(self) -> None:
        for task in getattr(self, "_tasks", []):
            task.cancel()
        if getattr(self, "_tasks", []) and await asyncio.to_thread(_is_being_deleted, self._app):
            await asyncio.gather(*map(self._end, self._gateways.values()))


def _is_being_deleted(app: str) -> bool:
    """Return whether Serve is deleting the application. If not, another controller will adopt this one's gateways."""
    status = serve.status().applications.get(app)
    return status is None or status.status == "DELETING"
