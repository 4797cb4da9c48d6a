"""The directory of live members: a named actor with which engines and gateways register, and which all of them watch.

    replica ── register(group, worker handles) ──> directory ── snapshots ──> gateways, engines
    gateway ── register(record) ───────────────>       │
    both    ── heartbeat ──────────────────────>       └── run() of every worker: Ray fails it when the process dies

A group leaves the snapshot the moment one of its processes dies; a lost machine or a dead gateway, when its heartbeats
stop and it does not answer probes (`member_probe.py`). A member that is only busy stays. A draining group stays listed,
as draining, until it has ended. The directory keeps nothing on disk: after a restart it tells its members that they are
unknown, and they register again. It ends when its application has been gone for a while (`AppLiveness`), and ends
gateways that are no Serve replicas with it; members that are still starting keep it alive. For an autoscaled
application, it decides the number of groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray.actor import ActorHandle

from baton.cluster.autoscaling.load_samples import GatewayLoad
from baton.cluster.autoscaling.scaler import FleetTarget, Scaler, scaler_for
from baton.cluster.contracts import (
    DirectorySnapshot,
    Drained,
    EngineGroup,
    EnginePulse,
    EngineTrace,
    GatewayRecord,
    Role,
    StartingGroup,
)
from baton.cluster.logs import LogSettings, configure
from baton.cluster.process_metrics import MetricsExporter
from baton.engine.net.curve import ClusterKey

from .member_probe import BUSY_S, MISSED_AFTER_S, ProcessState, probe_all
from .members import DirectoryMetrics, HeartbeatReply, Membership

logger = logging.getLogger(__name__)

NAMESPACE = "baton"  # of the actor's name
HEAD_NODE = "node:__internal_head__"  # which also has Ray's own state, so only the loss of that machine can hit both
HEARTBEAT_S = 1.0
RECOVERY_S = 3.0  # for which watchers wait after a restart, because an incomplete list would look like losses
# After a restart, until members that are not listed count as gone. A member whose call was lost with the predecessor
# gives it up after 10 s, and then registers again.
COMPLETE_S = 15.0
# After which a watch is answered even if nothing has changed: a watcher whose call was lost waits that much longer than
# for other answers.
WATCH_S = 3.0


class Directory:
    """The directory's actor. `get_directory` finds or starts it."""

    async def __init__(self, key: ClusterKey) -> None:  # type: ignore[misc]  # Ray awaits constructors
        self._key = key
        self._name = ray.get_runtime_context().get_actor_name() or "directory"
        self._log_as(LogSettings())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's context warns of names that only Ray itself uses
            restarted = ray.get_runtime_context().was_current_actor_reconstructed
        # Milliseconds of the wall clock, so that a restarted directory repeats no version of its predecessor.
        first_version = time.time_ns() // 1_000_000
        self._members = Membership(time.monotonic, first_version, is_complete=not restarted)
        self._changed = asyncio.Event()
        self._watched: dict[tuple[str, int | None], asyncio.Task[None]] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}  # of silent members
        self._actor_names: dict[str, list[str]] = {}  # by group
        self._free_standing: dict[str, ActorHandle] = {}  # gateways that are no Serve replicas
        self._answers_at_s = time.monotonic() + (RECOVERY_S if restarted else 0.0)
        self._app_liveness = AppLiveness(time.monotonic)
        self._scaler: Scaler | None = None
        self._exporter = MetricsExporter(DirectoryMetrics(self._members), host=ray.util.get_node_ip_address(), key=key)
        self._exporter.start()
        self._tasks = [asyncio.create_task(self._check_members()), asyncio.create_task(self._scale())]
        if restarted:
            self._tasks.append(asyncio.create_task(self._complete_list()))

    async def cluster_key(self, logs: LogSettings) -> ClusterKey:
        """Return the key of all sockets between members. It is a member's first call, and brings the log settings."""
        self._log_as(logs)
        return self._key

    def _log_as(self, settings: LogSettings) -> None:
        configure(settings, "directory", self._name)

    async def register_group(self, group: EngineGroup, actor_names: list[str]) -> EngineGroup:
        """List the engines, with their ranks, until one of the actors ends. Registering again has no effect.

        The actors come as names, not handles: Ray keeps a socket for each process that made a handle, even a dead one.
        """
        version = self._members.version
        listed = self._members.add_group(group)
        self._actor_names[group.group_id] = actor_names
        where = f"pid {group.engines[0].pid} on {group.engines[0].node_ip}"
        what = f"engine group {group.group_id} ({where})"
        if self._members.version != version:
            logger.info("%s is listed, with rank %d and the ranks after it", what, listed.engines[0].rank)
        self._watch(group.group_id, group.epoch, what, lambda: _actors_named(actor_names))
        self._announce()
        return listed

    async def register_gateway(self, record: GatewayRecord, actor: ActorHandle | None = None) -> None:
        """List a gateway. `actor` is given if it is no Serve replica, so that it ends with the application."""
        version = self._members.version
        self._members.add_gateway(record)
        if self._members.version != version:
            state = f"serves at port {record.port}" if record.is_serving else "is listed"
            logger.info("gateway %s (pid %d on %s) %s", record.identity, record.pid, record.node_ip, state)
        self._scaler = scaler_for(record.scaling, self._scaler)
        if actor is not None:
            self._free_standing[record.identity] = actor
            self._watch(record.identity, None, f"gateway {record.identity} (pid {record.pid})", lambda: [actor])
        self._announce()

    async def report_gateway(self, identity: str, load: GatewayLoad) -> None:
        """Pass a gateway's load on to the autoscaler."""
        if self._scaler is not None:
            self._scaler.update_gateway(identity, load)

    async def report_group(self, group_id: str, epoch: int, pulses: list[EnginePulse]) -> None:
        """Pass the pulses of a group's engines on to the autoscaler."""
        group = next((group for group in self._members.groups() if group.group_id == group_id), None)
        if self._scaler is not None and group is not None and group.epoch == epoch:
            self._scaler.update_group(group, pulses)

    async def wanted(self, role: Role, replicas: int) -> FleetTarget | None:
        """Return the target of a fleet that has `replicas` groups now; None without autoscaling."""
        if self._scaler is None:
            return None
        self._scaler.start_from({role: replicas})
        return self._scaler.wanted(role)

    async def leave(self, name: str, epoch: int | None = None, why: str = "") -> None:
        """Remove a member that ends on purpose, or because one of its processes has ended.

        Unknown names are ignored.
        """
        if self._members.remove(name, epoch):
            self._members.ask_to_leave(name, leave=False)  # it does not return
            level = logging.WARNING if why else logging.INFO
            logger.log(level, "%s has left%s", name, f": {why}" if why else "")
            self._announce()

    async def drain(self, group_id: str, epoch: int, draining: bool) -> None:
        """Make gateways stop choosing the group's engines, or choose them again."""
        self._members.set_draining(group_id, epoch, draining)
        self._announce()

    async def drain_rank(self, rank: int) -> list[int]:
        """Ask the group of this rank to drain and end; return its ranks. Raises `NoSuchRank`."""
        group = self._members.group_with(rank)
        self._members.ask_to_leave(group.group_id)
        return [engine.rank for engine in group.engines]

    async def profile(self, start: bool) -> list[EngineTrace]:
        """Begin or end the traces of all engines; return those that were begun, or written.

        Engines that cannot answer are left out.
        """
        groups = {group.group_id for group in self._members.groups()}
        self._actor_names = {name: actors for name, actors in self._actor_names.items() if name in groups}
        method = "start_profile" if start else "stop_profile"
        actors: list[ActorHandle] = []
        for names in self._actor_names.values():
            with contextlib.suppress(ValueError):  # one of its processes has just ended
                actors += await asyncio.to_thread(_actors_named, names)
        calls = [getattr(actor, method).remote() for actor in actors]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for error in (each for each in answers if isinstance(each, BaseException)):
            logger.warning("an engine could not record or write its trace: %s", error)
        return [each for each in answers if isinstance(each, EngineTrace)]

    async def drained(self, group_id: str, epoch: int, drained: Drained) -> None:
        """Count a group that has drained, and remove it."""
        self._members.drains = self._members.drains.plus(drained)
        await self.leave(group_id, epoch)

    async def heartbeat(self, name: str, epoch: int | None = None) -> HeartbeatReply:
        """Note a member's heartbeat, and return the directory's reply."""
        if name not in self._free_standing:
            self._app_liveness.note_heartbeat()
        return self._members.note_heartbeat(name, epoch)

    async def application_lives(self, starting: StartingGroup | None = None) -> None:
        """Note that a member is starting; for a group, also what it is doing."""
        self._app_liveness.note_heartbeat()
        if starting is not None:
            version = self._members.version
            self._members.note_starting(starting)
            if self._members.version != version:
                self._announce()

    async def watch(self, version: int) -> DirectorySnapshot | None:
        """Return the first snapshot of another version, or None after `WATCH_S` seconds without one."""
        await asyncio.sleep(max(0.0, self._answers_at_s - time.monotonic()))
        try:
            async with asyncio.timeout(WATCH_S):
                while self._members.version == version:
                    await self._changed.wait()
        except TimeoutError:
            return None
        snapshot = self._members.snapshot()
        return msgspec.structs.replace(snapshot, directory=self._name, metrics_address=self._exporter.address)

    async def end(self) -> None:
        """End everything that would outlive the application: gateways that are no Serve replicas, and this actor."""
        for actor in self._free_standing.values():
            ray.kill(actor)
        ray.kill(ray.get_runtime_context().current_actor)

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()  # present watchers have been woken; later ones wait for the next change

    def _watch(self, name: str, epoch: int | None, what: str, find: Callable[[], list[ActorHandle]]) -> None:
        if (name, epoch) not in self._watched:
            self._watched[name, epoch] = asyncio.create_task(self._watch_processes(name, epoch, what, find))

    async def _watch_processes(
        self, name: str, epoch: int | None, what: str, find: Callable[[], list[ActorHandle]]
    ) -> None:
        """Wait until one of the actors ends, then remove the member: its other actors are of no use alone."""
        errors = await _first_end(find)
        del self._watched[name, epoch]
        self._free_standing.pop(name, None)
        if any(isinstance(error, ray.exceptions.ActorUnavailableError) for error in errors):
            self._app_liveness.lost()
        if self._members.remove(name, epoch):
            reasons = ", ".join(sorted({type(error).__name__ for error in errors if error is not None}))
            logger.warning("%s is gone: Ray saw a process of it %s", what, f"die ({reasons})" if reasons else "end")
            self._announce()

    async def _check_members(self) -> None:
        while True:
            slept_s = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)
            self._skip_stall(time.monotonic() - slept_s - HEARTBEAT_S)
            self._probe_suspects()
            silent = self._members.remove_silent()
            if silent:
                silence = f"the directory had no sign of life for {MISSED_AFTER_S:.0f} s or longer"
                logger.warning("%s is gone: %s", ", ".join(silent), silence)
                self._app_liveness.lost()
                self._announce()
            if self._app_liveness.is_gone:
                logger.info("the application is gone, so the directory ends")
                await self.end()

    async def _complete_list(self) -> None:
        await asyncio.sleep(COMPLETE_S)
        self._members.complete()
        self._announce()

    def _probe_suspects(self) -> None:
        for name, addresses in self._members.suspects().items():
            if name not in self._probes:
                self._probes[name] = asyncio.create_task(self._probe(name, addresses))

    async def _probe(self, name: str, addresses: list[str]) -> None:
        try:
            state = await probe_all(addresses)
        finally:
            del self._probes[name]
        if self._members.note_probe(name, state):
            logger.warning(
                "%s sends no heartbeats, but %s: it is kept for %.0f s", name, ProcessState.RUNS.value, BUSY_S
            )

    def _skip_stall(self, stalled_s: float) -> None:
        """Do not count a time in which this process was stopped: heartbeats that arrived then are only read later."""
        if stalled_s > HEARTBEAT_S:
            self._members.skip_stall(stalled_s)
            self._app_liveness.skip_stall(stalled_s)

    async def _scale(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._scaler is not None:
                try:
                    self._decide(self._scaler)
                except Exception:
                    logger.exception("the autoscaler failed: its last decision holds, and it will try again")

    def _decide(self, scaler: Scaler) -> None:
        gateways = [gateway.identity for gateway in self._members.snapshot().gateways]
        for group_id, leave in scaler.update(time.monotonic(), gateways, self._members.groups()).items():
            self._members.ask_to_leave(group_id, leave)


async def _first_end(find: Callable[[], list[ActorHandle]]) -> list[BaseException | None]:
    """Return how the first actors to end did so. `find` may wait for Ray; it raises `ValueError` if one is dead."""
    try:
        actors = await asyncio.to_thread(find)
    except ValueError as error:
        return [error]
    runs: list[asyncio.Future[None]] = [asyncio.ensure_future(actor.run.remote()) for actor in actors]
    await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
    errors = [run.exception() for run in runs if run.done() and not run.cancelled()]
    for run in runs:
        run.cancel()
    return errors


def _actors_named(names: list[str]) -> list[ActorHandle]:
    return [ray.get_actor(name, namespace=NAMESPACE) for name in names]


def directory_name(app: str) -> str:
    return f"baton-directory:{app}"


def get_directory(app: str) -> ActorHandle:
    """Return the directory of the application `app`, and start it if there is none. Ray restarts it if it dies.

    It is detached, because any of its members may be replaced at any time; `AppLiveness` decides when it ends.
    """
    actor: Any = ray.remote(Directory)
    return actor.options(
        name=directory_name(app),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources={HEAD_NODE: 0.001},  # pins it to that node; the amount has no meaning
        scheduling_strategy="DEFAULT",  # not in the placement group of the member that happens to start it
        max_restarts=-1,
        max_concurrency=10_000,
    ).remote(ClusterKey.generate())


NO_MEMBER_S = 30.0
# A broken link ends no process, and members that return could not talk to members of another directory, whose cluster
# key is another one. After about a minute, Ray gives up a silent machine and ends its processes.
LOST_S = 150.0


class AppLiveness:
    """The signs of life that one directory has seen. It uses neither Ray nor a clock of its own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heartbeat_s = clock()
        self._some_are_lost = False

    def note_heartbeat(self) -> None:
        """Note a sign of life of a member."""
        self._heartbeat_s, self._some_are_lost = self._clock(), False

    def lost(self) -> None:
        """Note that a member is out of reach, but may be alive."""
        self._some_are_lost = True

    def skip_stall(self, stalled_s: float) -> None:
        """Do not count a time in which this process was stopped and received nothing."""
        self._heartbeat_s += stalled_s

    @property
    def is_gone(self) -> bool:
        return self._clock() - self._heartbeat_s > (LOST_S if self._some_are_lost else NO_MEMBER_S)
