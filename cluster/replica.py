"""The control plane of one engine: a Serve deployment's replica that starts the engine's worker and answers for it.

It loads no torch. When its worker dies or hangs it fails its health check, and Serve replaces both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import ray
from ray import serve

from baton.kv_transfer.curve import ClusterKey

from .contracts import EngineRecord, Role
from .directory import DirectoryWatch, presence, stay_registered
from .spec import load_spec
from .worker import EngineLaunch, EngineWorker

logger = logging.getLogger(__name__)

STOP_S = 3.0  # for a worker to end by itself
PULSE_S = 1.0  # between looks at the worker's step loop


class EngineReplica:
    """Constructed when its engine is ready; raises what the engine raised while it was built."""

    async def __init__(self, args: dict[str, Any], role: str) -> None:  # type: ignore[misc]  # Serve awaits constructors
        spec = load_spec(args)
        context = serve.get_replica_context()
        self._directory = DirectoryWatch(context.app_name)
        key: ClusterKey = await self._directory.call("cluster_key")
        launch = EngineLaunch(spec, Role(role), f"{role}-{context.replica_id.unique_id}", context.app_name, key)
        fleet = spec.fleets.present[launch.role]
        worker_class: Any = ray.remote(EngineWorker)
        self._worker = worker_class.options(
            num_cpus=fleet.num_cpus,
            num_gpus=spec.gpus_of(launch.role, ray.cluster_resources().get("GPU", 0.0)),
            resources=fleet.resources or None,
            max_concurrency=1000,
        ).remote(launch)
        async with presence(self._directory):
            self._record: EngineRecord = await self._worker.start.remote()
        self._death = ""
        self._heart = asyncio.create_task(
            stay_registered(self._directory, self._record.engine_id, self._record.epoch, self._register)
        )
        self._tasks = [
            self._heart,
            asyncio.create_task(self._watch_worker()),
            asyncio.create_task(self._watch_steps(fleet.step_timeout_s)),
        ]

    async def check_health(self) -> None:
        """Serve asks. Raises where the worker is dead or hangs."""
        if self._death:
            raise RuntimeError(self._death)

    async def record(self) -> EngineRecord:
        """The engine as the directory lists it."""
        return self._record

    async def _register(self) -> None:
        self._record = await self._directory.call("register_engine", self._record, self._worker)

    async def _watch_worker(self) -> None:
        try:
            await self._worker.run.remote()
            self._declare_dead("ended")
        except Exception as error:  # whatever Ray says: it does not serve any more
            self._declare_dead(f"died: {error}")

    async def _watch_steps(self, timeout_s: float) -> None:
        """Ends a worker that lives but stands still: a deadlock, a device that never answers, a stopped process."""
        stalled_s = 0.0
        while stalled_s < timeout_s:
            await asyncio.sleep(PULSE_S)
            try:
                stalled_s = await asyncio.wait_for(self._worker.stalled_s.remote(), timeout_s)
            except TimeoutError:
                stalled_s = timeout_s
            except ray.exceptions.RayError:
                return  # `_watch_worker` says what happened
        self._declare_dead(f"has stood still for {stalled_s:.0f} s (step_timeout_s is {timeout_s:g})")
        await self._leave()  # at once: nobody closes the connections of a process that hangs
        ray.kill(self._worker)

    def _declare_dead(self, how: str) -> None:
        if not self._death:  # one that hangs is killed, which is no news
            self._death = f"the worker of engine {self._record.engine_id} (pid {self._record.pid}) {how}"
            logger.error(self._death)
        self._heart.cancel()  # a dead engine has none

    async def _leave(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # heartbeats that end say the same, only later
            await self._directory.call("leave", self._record.engine_id, self._record.epoch)

    async def __del__(self) -> None:
        for task in getattr(self, "_tasks", []):
            task.cancel()
        if hasattr(self, "_record"):
            await self._leave()
            await self._end_worker()

    async def _end_worker(self) -> None:
        """In order if it can, so that memory shared with peers is released; by force if it does not answer."""
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
            await asyncio.wait_for(self._worker.stop.remote(), STOP_S)
        ray.kill(self._worker)
