"""The control plane of one engine group: a replica of a Serve deployment that starts its workers and reports their
health.

STARTING ──> SERVING ──Serve ends it──────────────────────> DRAINING ──> ended
                 ├─────directory: leave ──> DRAINING ──> its health check fails, and Serve ends it
                 │                             └── directory: stay ──> SERVING
                 └─────a worker dies or hangs ────────────> its health check fails, and Serve replaces it

The replica loads no torch. If one of its workers dies or hangs it ends them all, and Serve replaces the whole group.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray import serve
from ray.util.placement_group import get_current_placement_group

from baton.cluster.contracts import EngineGroup, Role, StartingGroup
from baton.cluster.logs import configure
from baton.cluster.membership.directory_client import ANSWER_S, DirectoryClient, keep_app_alive
from baton.cluster.membership.draining import drain
from baton.cluster.membership.members import HeartbeatReply
from baton.cluster.spec import Bundle, FleetSpec, Reservations, load_spec
from baton.engine.net.curve import ClusterKey

from .group import GroupCannotStart, WorkerGroup
from .launch import EngineLaunch
from .registration import GroupRegistration

logger = logging.getLogger(__name__)

PULSE_S = 1.0  # between two checks of the engines' step loops
RETRY_S = 1.0  # before a message that did not reach the directory is sent again


class EngineReplica:
    """Serve's replica of one group. The constructor returns when its engines are ready, or raises a worker's error."""

    async def __init__(self, args: dict[str, Any], role: str, bundle: Bundle) -> None:  # type: ignore[misc]  # awaited
        """`bundle`: the resources of one rank in the placement group that Serve has created for this replica."""
        spec = load_spec(args)
        context = serve.get_replica_context()
        group_id = f"{role}-{context.replica_id.unique_id}"
        self._name = f"engine group {group_id}"
        configure(spec.logging, "group", group_id)
        directory = DirectoryClient(context.app_name)
        key: ClusterKey = await directory.call("cluster_key", spec.logging)
        launch = EngineLaunch(spec, Role(role), group_id, context.app_name, key)
        self._fleet = spec.fleets.present[launch.role]
        check_gpus(spec, launch.role, bundle)
        placement = get_current_placement_group()
        assert placement is not None, "the deployment has one"
        self._workers = WorkerGroup(launch, bundle, placement)
        host = ray.util.get_node_ip_address()

        def describe() -> StartingGroup:
            return StartingGroup(group_id, launch.role, host, self._workers.state)

        async with keep_app_alive(directory, describe):
            engines = await self._workers.start()
        group = EngineGroup(group_id=group_id, first_rank=spec.first_rank(launch.role), engines=engines)
        self._registration = GroupRegistration(directory, group, self._workers.actor_names)
        self._end = ""  # the reason, once the group has ended
        self._is_ended_by_serve = False
        self._leaving: asyncio.Task[None] | None = None
        self._tasks = [
            self._registration.start(on_reply=self._follow_reply),
            asyncio.create_task(self._watch_workers()),
            asyncio.create_task(self._watch_steps(self._fleet.step_timeout_s)),
        ]
        if spec.autoscaling is not None:
            self._tasks.append(asyncio.create_task(self._report()))

    async def check_health(self) -> None:
        """Answer Serve's health check. Raises if the group, or a task that watches it, has ended."""
        if self._end:
            raise RuntimeError(self._end)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def _watch_workers(self) -> None:
        await self._end_group(await self._workers.wait_for_end())

    async def _watch_steps(self, timeout_s: float) -> None:
        """End a group that makes no progress although it is alive: a deadlock, a silent device, a stopped process."""
        stalled_s = 0.0
        while stalled_s < timeout_s:
            await asyncio.sleep(PULSE_S)
            try:
                pulses = await asyncio.wait_for(self._workers.pulses(), timeout_s)
                stalled_s = max((pulse.stalled_s for pulse in pulses), default=0.0)
            except TimeoutError:
                stalled_s = timeout_s
            except ray.exceptions.RayActorError:
                return  # `_watch_workers` reports what happened
        await self._end_group(f"has made no progress for {stalled_s:.0f} s (step_timeout_s is {timeout_s:g})")

    async def _report(self) -> None:
        """Report the engines' pulses to the autoscaler."""
        while True:
            await asyncio.sleep(PULSE_S)
            try:
                pulses = await asyncio.wait_for(self._workers.pulses(), ANSWER_S)
            except TimeoutError:  # a link may lose an answer; `_watch_steps` notices engines that make no progress
                continue
            except ray.exceptions.RayActorError:
                return  # `_watch_workers` reports what happened
            await self._registration.report(pulses)

    async def _end_group(self, why: str) -> None:
        """Kill all workers: a hanging process keeps its connections open, and single ranks are of no use."""
        if self._end:  # the workers are being ended already
            return
        self._end = f"{self._name}: {why}"
        logger.error(self._end)
        if self._leaving is not None:  # its drain may be waiting for engines that never answer
            self._leaving.cancel()
        await self._registration.leave(self._end)
        self._workers.kill()

    def _follow_reply(self, reply: HeartbeatReply) -> None:
        """Drain when the directory asks the group to leave, and stop draining when it asks the group to stay.

        After requests have been handed over the group cannot stay, because its engines accept nothing any more.
        """
        if self._is_ended_by_serve or self._end:
            return
        if reply is HeartbeatReply.LEAVE and self._leaving is None:
            self._leaving = asyncio.create_task(self._leave_as_asked())
        elif reply is HeartbeatReply.LISTED and self._leaving is not None and not self._workers.has_returned_requests:
            self._leaving.cancel()
            self._leaving = asyncio.create_task(self._stay())

    async def _leave_as_asked(self) -> None:
        await self._drain()
        if self._end:  # a worker died meanwhile
            return
        self._end = f"{self._name}: drained, as it was asked to"
        logger.info(self._end)
        await self._workers.stop()
        self._workers.kill()

    async def _stay(self) -> None:
        # Repeat until the call has arrived: otherwise gateways would never choose the group again.
        while not (self._is_ended_by_serve or await self._registration.set_draining(False)):
            await asyncio.sleep(RETRY_S)
        self._leaving = None

    async def _drain(self) -> None:
        """Return when every request has finished or was handed over, and the directory no longer lists the group."""
        await self._registration.set_draining(True)
        try:
            drained = await drain(self._workers, self._fleet.drain_timeout_s)
        except ray.exceptions.RayError as error:  # a worker has died, so there is nothing to wait for
            logger.warning("%s did not drain: %s", self._name, type(error).__name__)
            await self._registration.leave()
        else:
            what = f"drained in {drained.seconds:.1f} s"
            logger.info("%s %s and handed %d requests over", self._name, what, drained.handed_over)
            await self._registration.leave_drained(drained)

    async def __del__(self) -> None:
        """Drain, leave and end the workers. Serve calls this to end the replica, and waits for it."""
        if not hasattr(self, "_tasks"):  # the start failed, and `WorkerGroup.start` has killed its processes
            return
        self._is_ended_by_serve = True
        if self._leaving is not None:
            await asyncio.wait([self._leaving])
        if not self._end:
            self._leaving = asyncio.create_task(self._drain())
            await asyncio.wait([self._leaving])
            self._end = self._end or f"{self._name}: ended normally"
        for task in self._tasks:
            task.cancel()
        await self._registration.leave()
        await self._workers.stop()
        self._workers.kill()


def check_gpus(spec: FleetSpec, role: Role, bundle: Bundle) -> None:
    """Refuse to run on CPUs by mistake. Raises `GroupCannotStart` if this machine has GPUs and none is reserved."""
    here = ray.get_runtime_context().get_node_id()
    gpus = next(node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["NodeID"] == here)
    if Reservations(spec, gpus).gpus_of(role) > bundle.get("GPU", 0.0):
        raise GroupCannotStart(
            f"this machine has {gpus:g} GPUs, of which none are reserved: the cluster had none when the application was"
            f" deployed. Deploy it again, or set fleets.{role}.num_gpus: 1, or engine.device: cpu"
        )
