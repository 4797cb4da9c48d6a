"""Who is alive: the one named actor that engines and gateways register with and everyone watches.

    replica ── register(group, worker handles) ──> directory ── snapshots ──> gateways, engines
    gateway ── register(record) ───────────────>       │
    both    ── heartbeat ──────────────────────>       └── run() of every worker: Ray fails it when the process dies

A group leaves the snapshot the moment one of its processes dies; a lost machine or a dead gateway when its heartbeats
stop. The directory keeps nothing on disk: after a restart its members are told that they are unknown, and register
again. It ends itself when its application has been gone for a while, and gateways that nobody else would end with it;
members that are still starting say that there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray.actor import ActorHandle

from baton.kv_transfer.curve import ClusterKey

from .contracts import DirectorySnapshot, EngineGroup, EngineRecord, GatewayRecord

logger = logging.getLogger(__name__)

NAMESPACE = "baton"  # of the actor's name
HEARTBEAT_S = 1.0
MISSED_AFTER_S = 6.0  # a member that was silent for so long is gone
RECOVERY_S = 3.0  # after a restart watchers wait so long, that nobody takes a half-filled list for the whole
WATCH_S = 20.0  # a watch without news is answered after so long
LONELY_S = 30.0  # a directory that hears nothing for so long has lost its application
PRESENCE_S = 5.0  # between signs of life of a member that is not ready yet


@dataclass
class Member:
    heard_s: float
    group: EngineGroup | None = None
    gateway: GatewayRecord | None = None

    @property
    def epoch(self) -> int | None:
        return None if self.group is None else self.group.epoch


class Membership:
    """The list of members and its versions. Plain data: no Ray, no clock of its own.

    Versions count up from `first_version`; a directory that restarts must begin above where the last one ended.
    """

    def __init__(self, clock: Callable[[], float], first_version: int) -> None:
        self._clock = clock
        self._members: dict[str, Member] = {}
        self.version = first_version

    def __len__(self) -> int:
        return len(self._members)

    def add_group(self, group: EngineGroup) -> EngineGroup:
        """Gives the engines ranks: those that they had, where they are free (a returning group), else the first run of
        free ones among those of the fleet, which are cut into runs of a group's size.
        """
        known = self._members.get(group.group_id)
        if known is not None and known.group is not None and known.epoch == group.epoch:
            known.heard_s = self._clock()
            return known.group
        taken = {engine.rank for name, engine in self._engines() if name != group.group_id}
        size = len(group.engines)
        had = range(group.engines[0].rank, group.engines[0].rank + size)
        runs = (range(start, start + size) for start in itertools.count(group.first_rank, size))
        if had.start < 0 or taken.intersection(had):
            had = next(run for run in runs if not taken.intersection(run))
        engines = [msgspec.structs.replace(engine, rank=rank) for engine, rank in zip(group.engines, had, strict=True)]
        listed = msgspec.structs.replace(group, engines=engines)
        self._members[group.group_id] = Member(self._clock(), group=listed)
        self.version += 1
        return listed

    def add_gateway(self, record: GatewayRecord) -> None:
        known = self._members.get(record.identity)
        if known is None or known.gateway != record:
            self.version += 1
        self._members[record.identity] = Member(self._clock(), gateway=record)

    def remove(self, name: str, epoch: int | None = None) -> bool:
        """Removes a member. A group only if it still is the one of that epoch. False where there was none."""
        member = self._members.get(name)
        if member is None or (epoch is not None and member.epoch not in (None, epoch)):
            return False
        del self._members[name]
        self.version += 1
        return True

    def heard(self, name: str, epoch: int | None = None) -> bool:
        """A sign of life. False where the member is unknown and must register again."""
        member = self._members.get(name)
        if member is None or member.epoch not in (None, epoch):
            return False
        member.heard_s = self._clock()
        return True

    def remove_silent(self, longer_than_s: float) -> list[str]:
        """Removes members that gave no sign of life for `longer_than_s`; returns their names."""
        now = self._clock()
        silent = [name for name, member in self._members.items() if now - member.heard_s > longer_than_s]
        for name in silent:
            self.remove(name)
        return silent

    def snapshot(self) -> DirectorySnapshot:
        engines = sorted((engine for _, engine in self._engines()), key=lambda engine: engine.rank)
        gateways = [member.gateway for member in self._members.values() if member.gateway is not None]
        return DirectorySnapshot(self.version, engines, gateways)

    def _engines(self) -> Iterator[tuple[str, EngineRecord]]:
        """With the names of their groups."""
        for name, member in self._members.items():
            if member.group is not None:
                yield from ((name, engine) for engine in member.group.engines)


class Directory:
    """The actor. `get_directory` finds or starts it."""

    async def __init__(self, key: ClusterKey) -> None:  # type: ignore[misc]  # Ray awaits constructors
        self._key = key
        # Wall-clock milliseconds: a restarted directory begins above every version that the last one gave out.
        self._members = Membership(time.monotonic, first_version=time.time_ns() // 1_000_000)
        self._changed = asyncio.Event()
        self._watched: dict[tuple[str, int | None], asyncio.Task[None]] = {}
        self._free_standing: dict[str, ActorHandle] = {}  # gateways that live until somebody ends them
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's context warns of names that only Ray itself uses
            restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._complete_at_s = time.monotonic() + (RECOVERY_S if restarted else 0.0)
        self._heard_s = time.monotonic()
        self._keeper = asyncio.create_task(self._keep())

    async def cluster_key(self) -> ClusterKey:
        return self._key

    async def register_group(self, group: EngineGroup, workers: list[ActorHandle]) -> EngineGroup:
        """Lists the engines, with their ranks, until one of the processes ends. Registering twice changes nothing."""
        listed = self._members.add_group(group)
        where = f"pid {group.engines[0].pid} on {group.engines[0].node_ip}"
        self._watch(group.group_id, group.epoch, f"engine group {group.group_id} ({where})", workers)
        self._announce()
        return listed

    async def register_gateway(self, record: GatewayRecord, actor: ActorHandle | None = None) -> None:
        """`actor` where it is no Serve replica: the directory ends it with the application."""
        self._members.add_gateway(record)
        if actor is not None:
            self._free_standing[record.identity] = actor
            self._watch(record.identity, None, f"gateway {record.identity} (pid {record.pid})", [actor])
        self._announce()

    async def leave(self, name: str, epoch: int | None = None) -> None:
        """A member ends on purpose. Unknown names are ignored."""
        if self._members.remove(name, epoch):
            self._announce()

    async def heartbeat(self, name: str, epoch: int | None = None) -> bool:
        """False: register again."""
        if name not in self._free_standing:
            self._heard_s = time.monotonic()
        return self._members.heard(name, epoch)

    async def application_lives(self) -> None:
        """Someone is about to become a member."""
        self._heard_s = time.monotonic()

    async def watch(self, version: int) -> DirectorySnapshot:
        """The first snapshot newer than `version`, or the current one after `WATCH_S` seconds."""
        await asyncio.sleep(max(0.0, self._complete_at_s - time.monotonic()))
        deadline_s = time.monotonic() + WATCH_S
        while self._members.version <= version and time.monotonic() < deadline_s:
            try:
                await asyncio.wait_for(self._changed.wait(), deadline_s - time.monotonic())
            except TimeoutError:
                break
        return self._members.snapshot()

    async def end(self) -> None:
        """Ends what would outlive the application: gateways that are no Serve replicas, and this actor."""
        for actor in self._free_standing.values():
            ray.kill(actor)
        ray.kill(ray.get_runtime_context().current_actor)

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()  # those who waited have been woken; the next ones wait for the next change

    def _watch(self, name: str, epoch: int | None, what: str, actors: list[ActorHandle]) -> None:
        if (name, epoch) not in self._watched:
            self._watched[name, epoch] = asyncio.create_task(self._watch_processes(name, epoch, what, actors))

    async def _watch_processes(self, name: str, epoch: int | None, what: str, actors: list[ActorHandle]) -> None:
        """Until one of them ends: the others are of no use without it."""
        runs: list[asyncio.Future[None]] = [asyncio.ensure_future(actor.run.remote()) for actor in actors]
        await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        errors = [run.exception() for run in runs if run.done() and not run.cancelled()]
        for run in runs:
            run.cancel()
        del self._watched[name, epoch]
        self._free_standing.pop(name, None)
        if self._members.remove(name, epoch):
            reasons = {f"died: {type(error).__name__}" for error in errors if error is not None}
            logger.warning("%s %s", what, ", ".join(sorted(reasons)) or "ended")
            self._announce()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            silent = self._members.remove_silent(MISSED_AFTER_S)
            if silent:
                logger.warning("no sign of life for %.0f s: %s", MISSED_AFTER_S, ", ".join(silent))
                self._announce()
            if time.monotonic() - self._heard_s > LONELY_S:
                logger.info("the application is gone, so the directory ends")
                await self.end()


def directory_name(app: str) -> str:
    return f"baton-directory:{app}"


def get_directory(app: str) -> ActorHandle:
    """The directory of the application `app`, started if there is none. Ray restarts it wherever it dies.

    Detached, because each of its members may be replaced at any time; see `LONELY_S` for how it ends.
    """
    actor: Any = ray.remote(Directory)
    return actor.options(
        name=directory_name(app),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=10_000,
    ).remote(ClusterKey.generate())


class DirectoryWatch:
    """The directory as a `SnapshotSource` of a client. Finds the actor anew where it is gone for good."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._actor = get_directory(app)

    async def watch(self, version: int) -> DirectorySnapshot:
        return await self.call("watch", version)

    async def call(self, method: str, *args: Any) -> Any:
        """Calls the actor. Raises what Ray raises; where the actor is dead, the next call finds its successor."""
        try:
            return await getattr(self._actor, method).remote(*args)
        except ray.exceptions.ActorDiedError:
            self._actor = get_directory(self._app)
            raise


@contextlib.asynccontextmanager
async def presence(directory: DirectoryWatch) -> AsyncIterator[None]:
    """Around a member's start, which takes minutes where its model is large: the directory must not take the
    application for gone meanwhile, since its successor would have another cluster key.
    """

    async def say_so() -> None:
        while True:
            with contextlib.suppress(ray.exceptions.RayError):  # registering will say what is wrong
                await directory.call("application_lives")
            await asyncio.sleep(PRESENCE_S)

    task = asyncio.create_task(say_so())
    try:
        yield
    finally:
        task.cancel()


async def stay_registered(
    directory: DirectoryWatch, name: str, epoch: int | None, register: Callable[[], Awaitable[Any]]
) -> None:
    """Registers, sends a heartbeat every second, and registers again when the directory has forgotten the member."""
    known = False
    while True:
        try:
            if not known:
                await register()
            known = bool(await directory.call("heartbeat", name, epoch))
        except ray.exceptions.RayError as error:
            logger.warning("the directory does not answer %s, trying again: %s", name, type(error).__name__)
            known = False
        await asyncio.sleep(HEARTBEAT_S if known else HEARTBEAT_S / 5)
