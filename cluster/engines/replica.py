"""The control plane of one engine group: a Serve deployment's replica that starts its workers and answers for them.

STARTING ──> SERVING ──Serve ends it─────────────────────> DRAINING ──> ended
                 ├─────directory: leave ──> DRAINING ──> its health check fails, and Serve ends it
                 │                             └── stay ──> SERVING
                 └─────a worker dies or hangs ───────────> its health check fails, and Serve replaces it

It loads no torch. When one of its workers dies or hangs it ends them all, and Serve replaces the group as a whole.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray import serve
from ray.util.placement_group import get_current_placement_group

from baton.cluster.contracts import EngineGroup, Role
from baton.cluster.logs import configure
from baton.cluster.membership.contact import ANSWER_S, DirectoryWatch, presence, stay_registered
from baton.cluster.membership.draining import drain
from baton.cluster.membership.members import Standing
from baton.cluster.spec import Bundle, FleetSpec, load_spec
from baton.engine.net.curve import ClusterKey

from .group import GroupCannotStart, WorkerGroup
from .launch import EngineLaunch

logger = logging.getLogger(__name__)

PULSE_S = 1.0  # between looks at the engines' step loops
TELL_AGAIN_S = 1.0


class EngineReplica:
    """Constructed when its engines are ready; raises what a worker raised while it started."""

    async def __init__(self, args: dict[str, Any], role: str, bundle: Bundle) -> None:  # type: ignore[misc]  # awaited
        """`bundle`: what one rank reserves, in the placement group that Serve has made for this replica."""
        spec = load_spec(args)
        context = serve.get_replica_context()
        group_id = f"{role}-{context.replica_id.unique_id}"
        configure(spec.logging, "group", group_id)
        self._directory = DirectoryWatch(context.app_name)
        key: ClusterKey = await self._directory.call("cluster_key", spec.logging)
        launch = EngineLaunch(spec, Role(role), group_id, context.app_name, key)
        self._fleet = spec.fleets.present[launch.role]
        check_gpus(spec, launch.role, bundle)
        placement = get_current_placement_group()
        assert placement is not None, "the deployment has one"
        self._workers = WorkerGroup(launch, bundle, placement)
        async with presence(self._directory):
            engines = await self._workers.start()
        first_rank = spec.first_rank(launch.role)
        self._group = EngineGroup(group_id=launch.group_id, first_rank=first_rank, engines=engines)
        self._end = ""  # why the group has ended
        self._is_ended_by_serve = False
        self._leaving: asyncio.Task[None] | None = None
        self._heart = asyncio.create_task(
            stay_registered(
                self._directory, self._group.group_id, self._group.epoch, self._register, on_standing=self._stand
            )
        )
        self._tasks = [
            self._heart,
            asyncio.create_task(self._watch_workers()),
            asyncio.create_task(self._watch_steps(self._fleet.step_timeout_s)),
        ]
        if spec.autoscaling is not None:
            self._tasks.append(asyncio.create_task(self._report()))

    async def check_health(self) -> None:
        """Serve asks. Raises where the group has ended, or nobody watches it any more."""
        if self._end:
            raise RuntimeError(self._end)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def _register(self) -> None:
        listed: EngineGroup = await self._directory.call("register_group", self._group, self._workers.actors)
        self._group = listed.with_draining(self._group.draining)  # which it may have begun to do meanwhile

    async def _watch_workers(self) -> None:
        await self._give_up(await self._workers.ended())

    async def _watch_steps(self, timeout_s: float) -> None:
        """Ends a group that lives but stands still: a deadlock, a device that never answers, a stopped process."""
        stalled_s = 0.0
        while stalled_s < timeout_s:
            await asyncio.sleep(PULSE_S)
            try:
                pulses = await asyncio.wait_for(self._workers.pulses(), timeout_s)
                stalled_s = max((pulse.stalled_s for pulse in pulses), default=0.0)
            except TimeoutError:
                stalled_s = timeout_s
            except ray.exceptions.RayActorError:
                return  # `_watch_workers` says what happened
        await self._give_up(f"has stood still for {stalled_s:.0f} s (step_timeout_s is {timeout_s:g})")

    async def _report(self) -> None:
        """Tells the autoscaler how the engines do."""
        while True:
            await asyncio.sleep(PULSE_S)
            try:
                pulses = await asyncio.wait_for(self._workers.pulses(), ANSWER_S)
            except TimeoutError:  # an answer may be lost with a link; `_watch_steps` looks whether they stand still
                continue
            except ray.exceptions.RayActorError:
                return  # `_watch_workers` says what happened
            await self._tell("report_group", pulses)

    async def _give_up(self, why: str) -> None:
        """Nobody closes the connections of a process that hangs, and a rank alone is of no use: all end."""
        if self._end:  # those that are killed are no news
            return
        self._end = f"engine group {self._group.group_id}: {why}"
        logger.error(self._end)
        if self._leaving is not None:  # it may wait for engines that never answer
            self._leaving.cancel()
        self._heart.cancel()
        await self._leave(self._end)
        self._workers.end()

    def _stand(self, standing: Standing) -> None:
        """What the directory says: a group that is asked to leave drains, and may be asked to stay until it hands over:
        engines that have are of no use any more.
        """
        if self._is_ended_by_serve or self._end:
            return
        if standing is Standing.LEAVE and self._leaving is None:
            self._leaving = asyncio.create_task(self._leave_as_asked())
        elif standing is Standing.LISTED and self._leaving is not None and not self._workers.has_handed_over:
            self._leaving.cancel()
            self._leaving = asyncio.create_task(self._stay())

    async def _leave_as_asked(self) -> None:
        await self._drain()
        if self._end:  # one of them died meanwhile
            return
        self._end = f"engine group {self._group.group_id}: drained, as it was asked to"
        logger.info(self._end)
        await self._workers.stop()
        self._workers.end()

    async def _stay(self) -> None:
        while not (self._is_ended_by_serve or await self._say_draining(False)):  # nobody would ever choose it again
            await asyncio.sleep(TELL_AGAIN_S)
        self._leaving = None

    async def _drain(self) -> None:
        """Returns when everything has ended or is in other hands, and the directory does not list the group."""
        await self._say_draining(True)
        last_word: tuple[Any, ...] = ("leave",)
        try:
            drained = await drain(self._workers, self._fleet.drain_timeout_s)
        except ray.exceptions.RayError as error:  # a worker has died: there is nothing to wait for
            logger.warning("engine group %s did not drain: %s", self._group.group_id, type(error).__name__)
        else:
            what = f"engine group {self._group.group_id} drained in {drained.seconds:.1f} s"
            logger.info("%s and handed %d requests over", what, drained.handed_over)
            last_word = ("drained", drained)
        self._heart.cancel()  # it would register the group again
        await self._tell(*last_word)

    async def _say_draining(self, draining: bool) -> bool:
        """Whether the directory heard it."""
        self._group = self._group.with_draining(draining)  # a directory that restarts hears it when we register again
        return await self._tell("drain", draining)

    async def _leave(self, why: str = "") -> None:
        await self._tell("leave", why)

    async def _tell(self, method: str, *args: Any) -> bool:
        """Whether that was heard. Of most things heartbeats, or their end, tell as well, only later."""
        try:
            await self._directory.call(method, self._group.group_id, self._group.epoch, *args)
        except ray.exceptions.RayError as error:
            logger.warning(
                "the directory did not hear %s of %s: %s", method, self._group.group_id, type(error).__name__
            )
            return False
        return True

    async def __del__(self) -> None:
        """Serve ends the replica, and waits for this."""
        if not hasattr(self, "_tasks"):  # it has not started: `WorkerGroup.start` clears away what there was
            return
        self._is_ended_by_serve = True
        if self._leaving is not None:
            await asyncio.wait([self._leaving])
        if not self._end:
            self._leaving = asyncio.create_task(self._drain())
            await asyncio.wait([self._leaving])
            self._end = self._end or f"engine group {self._group.group_id}: ended in order"
        for task in self._tasks:
            task.cancel()
        await self._leave()
        await self._workers.stop()
        self._workers.end()


def check_gpus(spec: FleetSpec, role: Role, bundle: Bundle) -> None:
    """Raises `GroupCannotStart` where the engine would leave this machine's GPUs alone by mistake."""
    here = ray.get_runtime_context().get_node_id()
    gpus = next(node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["NodeID"] == here)
    if spec.gpus_of(role, gpus) > bundle.get("GPU", 0.0):
        raise GroupCannotStart(
            f"this machine has {gpus:g} GPUs, of which none are reserved: the cluster had none when the application was"
            f" deployed. Deploy it again, or say it: fleets.{role}.num_gpus: 1, or engine.device: cpu"
        )
