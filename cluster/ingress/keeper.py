"""Gateways where the ranks are: one a node (hybrid) or one a rank (external).

    directory ── snapshots ──> GatewayKeeper (Serve, one replica) ── starts, replaces, ends ──> GatewayActor, one a post

Gateways outlive their keeper: when it dies they go on, and its successor finds them by their names. They end with the
application, or when their post has long been empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import time
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.cluster.contracts import DirectorySnapshot, GatewayRecord
from baton.cluster.logs import configure
from baton.cluster.membership.contact import DirectoryWatch, presence
from baton.cluster.membership.directory import NAMESPACE
from baton.cluster.spec import load_spec

from .posts import Ports, Post, posts_for
from .server import GatewayLaunch, GatewayServer, digest

logger = logging.getLogger(__name__)

RETRY_S = 2.0  # between attempts to start a gateway
START_S = 60.0  # for a gateway to start: a machine that has no room for it must not hold up the others
KILLED_S = 5.0  # for Ray to end a process that does not answer
SILENT_S = 10.0  # a gateway that is not listed for so long hangs, since one that dies is known at once
EMPTY_S = 300.0  # a gateway without a rank for so long is ended: engines that restart come back sooner


class GatewayActor:
    """One gateway as a Ray actor. `run` returns when it has ended."""

    def __init__(self, launch: GatewayLaunch) -> None:
        self._launch = launch
        self._server: GatewayServer | None = None
        self._starting = asyncio.Lock()
        self._draining = asyncio.Lock()

    async def start(self) -> GatewayRecord:
        """Returns when it serves; starting twice changes nothing. Raises `OSError` where the port is taken."""
        async with self._starting:
            if self._server is None:
                actor = ray.get_runtime_context().current_actor
                server = GatewayServer(self._launch, share_port=False, actor=actor)
                await server.start()
                self._server = server
        return self._server.record

    async def run(self) -> None:
        async with self._starting:  # the directory hears of a gateway, and asks, before it serves
            server = self._running
        await server.ended()
        async with self._draining:  # a drain under way still has to tell the directory, and whoever asked for it
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
class Gateway:
    """A gateway at its post."""

    actor: ActorHandle
    record: GatewayRecord
    run: asyncio.Future[None]
    needed_at_s: float = field(default_factory=time.monotonic)
    missed_at_s: float = math.inf  # since when the directory does not list it

    def look_up(self, listed: Container[str], now_s: float) -> None:
        """In a newer list of the directory."""
        self.missed_at_s = math.inf if self.record.identity in listed else min(self.missed_at_s, now_s)

    def has_ended(self, now_s: float) -> bool:
        """Or lives, but does not get to say so."""
        return self.run.done() or now_s - self.missed_at_s > SILENT_S


class Action(enum.Enum):
    """What a post wants of its keeper."""

    NOTHING = enum.auto()
    START = enum.auto()
    REPLACE = enum.auto()
    END = enum.auto()
    GIVE_UP = enum.auto()


def what_to_do(gateway: Gateway | None, *, needed: bool, application: str, now_s: float) -> Action:
    """Of a post that is `needed` or not, with the gateway that is there; `application`: the digest of its arguments."""
    if gateway is None:
        return Action.START if needed else Action.GIVE_UP
    if gateway.record.application != application:
        return Action.REPLACE if needed else Action.END
    return Action.END if now_s - gateway.needed_at_s > EMPTY_S else Action.NOTHING


class GatewayKeeper:
    """`engines` are the handles of the fleets' deployments: Serve deploys what an application's root is given.

    A port that is another program's fails nothing but its gateway: it is tried again, and the log says so.
    """

    async def __init__(self, args: dict[str, Any], engines: list[Any]) -> None:  # type: ignore[misc]  # Serve awaits constructors
        spec = load_spec(args)
        self._args, self._gateway = args, spec.gateway
        self._version = digest(args)
        self._mode = spec.load_balancing
        self._app = serve.get_replica_context().app_name
        configure(spec.logging, "keeper", f"keeper-{self._app}")
        self._directory = DirectoryWatch(self._app)
        self._ports = Ports(spec.gateway.port)
        self._gateways: dict[str, Gateway] = {}
        self._posts: dict[str, Post] = {}
        self._snapshot = await self._directory.watch(-1)
        self._adopt(self._snapshot)
        self._news = asyncio.Event()
        self._tasks = [asyncio.create_task(self._keep()), asyncio.create_task(self._watch())]

    async def check_health(self) -> None:
        """Serve asks. Raises what ended the keeper's work; a gateway's trouble is no reason to replace the keeper."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _watch(self) -> None:
        async with presence(self._directory):
            while True:
                try:
                    self._snapshot = await self._directory.watch(self._snapshot.version)
                    listed = {record.identity for record in self._snapshot.gateways}
                    for gateway in self._gateways.values():
                        gateway.look_up(listed, time.monotonic())
                    self._news.set()
                except ray.exceptions.RayError as error:
                    logger.warning("the directory does not answer, asking again: %s", type(error).__name__)
                    await asyncio.sleep(RETRY_S)

    async def _keep(self) -> None:
        while True:
            await self._forget_the_dead()
            needed = posts_for(self._mode, self._snapshot.engines)
            self._posts |= needed
            for post in list(self._posts.values()):  # one after the other: a new version must not end all at once
                await self._look_after(post, needed=post.name in needed)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), RETRY_S)
            self._news.clear()

    def _adopt(self, snapshot: DirectorySnapshot) -> None:
        """Takes over the gateways of an earlier keeper."""
        for record in snapshot.gateways:
            post = Post(record.reach, record.node_id, record.node_ip)
            try:
                actor = ray.get_actor(self._actor_name(post), namespace=NAMESPACE)
            except ValueError:
                continue  # it has ended meanwhile
            self._posts[post.name] = post
            self._ports.hold(post, record.port)
            self._gateways[post.name] = Gateway(actor, record, asyncio.ensure_future(actor.run.remote()))

    async def _forget_the_dead(self) -> None:
        for name, gateway in list(self._gateways.items()):
            if gateway.has_ended(time.monotonic()):
                how = "has ended" if gateway.run.done() else "hangs"
                logger.warning("gateway %s (pid %d) %s", gateway.record.identity, gateway.record.pid, how)
                ray.kill(gateway.actor)  # it may have ended in order, and its name is still taken
                await asyncio.wait([gateway.run], timeout=KILLED_S)
                if gateway.run.done():  # else once more: who asks for its name now would be given the one that hangs
                    del self._gateways[name]

    async def _look_after(self, post: Post, *, needed: bool) -> None:
        gateway, now_s = self._gateways.get(post.name), time.monotonic()
        if gateway is not None and needed:
            gateway.needed_at_s = now_s
        match what_to_do(gateway, needed=needed, application=self._version, now_s=now_s):
            case Action.GIVE_UP:
                self._ports.free(post)
                del self._posts[post.name]
            case Action.START:
                await self._start(post)
            case Action.REPLACE if gateway is not None:
                await self._end(gateway)
                await self._start(post)
            case Action.END if gateway is not None:
                await self._end(gateway)

    def _actor_name(self, post: Post) -> str:
        return f"baton-gateway:{self._app}:{post.name}"

    async def _start(self, post: Post) -> None:
        port = self._ports.of(post)
        launch = GatewayLaunch(self._app, self._args, post.reach, post.node_id, post.node_ip, port)
        actor_class: Any = ray.remote(GatewayActor)
        actor = actor_class.options(
            name=self._actor_name(post),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=NodeAffinitySchedulingStrategy(post.node_id, soft=False),
            num_cpus=self._gateway.num_cpus,
            resources=self._gateway.resources or None,
            max_concurrency=1000,
        ).remote(launch)
        try:
            record = await asyncio.wait_for(actor.start.remote(), START_S)
        except (TimeoutError, ray.exceptions.RayError) as error:
            why = str(error) or f"it has not started within {START_S:g} s"
            logger.error("no gateway at port %d of %s: %s", port, post.node_ip, why)
            ray.kill(actor)
            return
        logger.info("gateway %s at port %d of %s: %s", record.identity, record.port, record.node_ip, post.name)
        self._gateways[post.name] = Gateway(actor, record, asyncio.ensure_future(actor.run.remote()))

    async def _end(self, gateway: Gateway) -> None:
        longest_s = self._gateway.drain_s + self._gateway.drain_timeout_s + SILENT_S
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):  # it hangs or has died: that is an end, too
            await asyncio.wait_for(gateway.actor.drain.remote(), longest_s)
        ray.kill(gateway.actor)
        self._gateways = {name: other for name, other in self._gateways.items() if other is not gateway}

    async def __del__(self) -> None:
        for task in getattr(self, "_tasks", []):
            task.cancel()
        if hasattr(self, "_tasks") and await asyncio.to_thread(_is_being_deleted, self._app):
            await asyncio.gather(*map(self._end, self._gateways.values()))


def _is_being_deleted(app: str) -> bool:
    """Otherwise this keeper makes room for another one, which takes its gateways over."""
    status = serve.status().applications.get(app)
    return status is None or status.status == "DELETING"
