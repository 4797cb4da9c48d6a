"""The control plane of one engine group: a Serve deployment's replica that starts its workers and answers for them.

It loads no torch. When one of its workers dies or hangs it ends them all and fails its health check, and Serve replaces
the group as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import ray
from ray import serve

from baton.kv_transfer.curve import ClusterKey

from .contracts import EngineGroup, Role
from .directory import DirectoryWatch, presence, stay_registered
from .group import WorkerGroup
from .spec import load_spec
from .worker import EngineLaunch

logger = logging.getLogger(__name__)

PULSE_S = 1.0  # between looks at the engines' step loops


class EngineReplica:
    """Constructed when its engines are ready; raises what a worker raised while it started."""

    async def __init__(self, args: dict[str, Any], role: str) -> None:  # type: ignore[misc]  # Serve awaits constructors
        spec = load_spec(args)
        context = serve.get_replica_context()
        self._directory = DirectoryWatch(context.app_name)
        key: ClusterKey = await self._directory.call("cluster_key")
        launch = EngineLaunch(spec, Role(role), f"{role}-{context.replica_id.unique_id}", context.app_name, key)
        bundle = spec.bundle_of(launch.role, ray.cluster_resources().get("GPU", 0.0))
        self._workers = WorkerGroup(launch, bundle)
        async with presence(self._directory):
            engines = await self._workers.start()
        first_rank = spec.first_rank(launch.role)
        self._group = EngineGroup(group_id=launch.group_id, first_rank=first_rank, engines=engines)
        self._death = ""
        self._heart = asyncio.create_task(
            stay_registered(self._directory, self._group.group_id, self._group.epoch, self._register)
        )
        self._tasks = [
            self._heart,
            asyncio.create_task(self._watch_workers()),
            asyncio.create_task(self._watch_steps(spec.fleets.present[launch.role].step_timeout_s)),
        ]

    async def check_health(self) -> None:
        """Serve asks. Raises where the group has ended, or nobody watches it any more."""
        if self._death:
            raise RuntimeError(self._death)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def _register(self) -> None:
        self._group = await self._directory.call("register_group", self._group, self._workers.actors)

    async def _watch_workers(self) -> None:
        await self._give_up(await self._workers.ended())

    async def _watch_steps(self, timeout_s: float) -> None:
        """Ends a group that lives but stands still: a deadlock, a device that never answers, a stopped process."""
        stalled_s = 0.0
        while stalled_s < timeout_s:
            await asyncio.sleep(PULSE_S)
            try:
                stalled_s = await asyncio.wait_for(self._workers.stalled_s(), timeout_s)
            except TimeoutError:
                stalled_s = timeout_s
            except ray.exceptions.RayError:
                return  # `_watch_workers` says what happened
        await self._give_up(f"has stood still for {stalled_s:.0f} s (step_timeout_s is {timeout_s:g})")

    async def _give_up(self, why: str) -> None:
        """Nobody closes the connections of a process that hangs, and a rank alone is of no use: all end."""
        if self._death:  # those that are killed are no news
            return
        self._death = f"engine group {self._group.group_id}: {why}"
        logger.error(self._death)
        self._heart.cancel()
        await self._leave()
        await self._workers.end()

    async def _leave(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # heartbeats that end say the same, only later
            await self._directory.call("leave", self._group.group_id, self._group.epoch)

    async def __del__(self) -> None:
        for task in getattr(self, "_tasks", []):
            task.cancel()
        if hasattr(self, "_group"):
            await self._leave()
            if not self._death:
                await self._workers.stop()
            await self._workers.end()
