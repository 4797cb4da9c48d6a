"""The processes of one engine group: a Ray actor in each bundle of its replica's placement group.

    1  assign_ranks   sort bundles by node and number them
    2  fetch          the first rank of each node downloads what the node lacks of a model on the Hub
    3  open           rank 0 opens the rendezvous of all ranks, each leader the sockets that its followers connect to
    4  start          start followers, then leaders; done when every leader has built its engine
    5  wait_for_end   when one process ends, all others are ended

rank = dp_rank x tp_size + tp_rank. Ranks with tp_rank 0 are leaders: they hold the engines that gateways talk to. Serve
creates and removes the placement group with the replica, which runs in its first bundle (`Reservations.bundles_of`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.cluster.contracts import EnginePulse, EngineRecord
from baton.cluster.disks import full_disks
from baton.cluster.membership.directory import NAMESPACE
from baton.cluster.spec import Bundle

from .launch import EngineLaunch, RankAssignment, RankConfig, RankEndpoints, assign_ranks
from .worker import EngineWorker

logger = logging.getLogger(__name__)

FETCH_PROGRESS_S = 2.0  # between two requests for the progress of a download


class GroupCannotStart(RuntimeError):
    """One of the group's processes failed while it started."""


@dataclass(frozen=True)
class Worker:
    """The process of one rank."""

    assignment: RankAssignment
    actor: ActorHandle

    @property
    def rank(self) -> int:
        return self.assignment.rank


class WorkerGroup:
    """The processes of one group. They start and end together; always call `kill` at the end."""

    def __init__(self, launch: EngineLaunch, bundle: Bundle, placement: PlacementGroup) -> None:
        """`bundle`: the resources that one rank takes out of its bundle of `placement`."""
        self._launch, self._bundle, self._placement = launch, bundle, placement
        self.workers: list[Worker] = []
        self.state = "starts its processes"  # of the start, for people
        self.has_returned_requests = False  # set before the engines are asked to return them

    @property
    def actor_names(self) -> list[str]:
        """Return the names of the actors. Names, because Ray keeps a connection to each process that made a handle."""
        return [self._name(worker.rank) for worker in self.workers]

    @property
    def leaders(self) -> list[Worker]:
        return self.workers[:: self._launch.tensor_parallel_size]

    async def start(self) -> list[EngineRecord]:
        """Start all processes and return the engines, in the order of their data-parallel ranks.

        Raises the error that ended the start, once every process has been killed.
        """
        try:
            assignments = await self._assign_ranks()
            self.workers = [Worker(assignment, self._create(assignment)) for assignment in assignments]
            folders = await self._fetch()
            endpoints = await self._all({worker: worker.actor.open.remote() for worker in self.workers})
            configs = rank_configs(assignments, endpoints, self._launch.tensor_parallel_size)
            return await self._start(
                {
                    worker: replace(config, model=folders[worker.assignment.node])
                    for worker, config in zip(self.workers, configs, strict=True)
                }
            )
        except BaseException:
            self.kill()
            raise

    async def wait_for_end(self) -> str:
        """Wait until the first process ends, and return a description of its end."""
        runs: dict[asyncio.Future[None], Worker] = {
            asyncio.ensure_future(worker.actor.run.remote()): worker for worker in self.workers
        }
        done, waiting = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        for run in waiting:
            run.cancel()
        return "; ".join(f"rank {runs[run].rank} {describe_end(run.exception())}" for run in done)

    async def pulses(self) -> list[EnginePulse]:
        """Return the pulses of all engines, in the order of their ranks. Raises `RayError` if one is dead."""
        return list(await asyncio.gather(*(worker.actor.pulse.remote() for worker in self.leaders)))

    async def return_requests(self) -> None:
        """Make all engines give back their unfinished requests and accept no more. Raises `RayError` if one is dead."""
        self.has_returned_requests = True
        await asyncio.gather(*(worker.actor.return_requests.remote() for worker in self.leaders))

    async def stop(self) -> None:
        """Ask the workers to end by themselves, so that memory shared with peers is released; wait at most `stop_s`."""
        with contextlib.suppress(TimeoutError):
            stops = [worker.actor.stop.remote() for worker in self.workers]
            await asyncio.wait_for(asyncio.gather(*stops, return_exceptions=True), self._launch.stop_s)

    def kill(self) -> None:
        """Kill all workers. Killing twice is allowed."""
        for worker in self.workers:
            ray.kill(worker.actor)
        self.workers = []

    async def _assign_ranks(self) -> list[RankAssignment]:
        size, tp_size = self._launch.world_size, self._launch.tensor_parallel_size
        table = await asyncio.to_thread(placement_group_table, self._placement)
        nodes = [table["bundles_to_node_id"][index] for index in range(size)]
        assignments = assign_ranks(nodes, tp_size)
        for first in range(0, size, tp_size):
            if len({each.node for each in assignments[first : first + tp_size]}) > 1:
                logger.warning(
                    "ranks %d to %d share a model's layers across machines, which is slow: give a tensor_parallel_size "
                    "of at most a machine's devices",
                    first,
                    first + tp_size - 1,
                )
        return assignments

    def _name(self, rank: int) -> str:
        return f"baton-rank:{self._launch.group_id}:{rank}"

    def _create(self, assignment: RankAssignment) -> ActorHandle:
        bundle = assignment.bundle
        strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
        own = {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")}
        actor_class: Any = ray.remote(EngineWorker)
        return actor_class.options(
            name=self._name(assignment.rank),
            namespace=NAMESPACE,
            num_cpus=self._bundle.get("CPU", 0),
            num_gpus=self._bundle.get("GPU", 0),
            resources=own or None,
            scheduling_strategy=strategy,
            max_concurrency=1000,
        ).remote(self._launch, assignment)

    async def _fetch(self) -> dict[str, str]:
        """Download what nodes lack of a model on the Hub, and return the model's folder by node.

        This may take hours. No rank has started yet, so no rank gives up waiting for another one.
        """
        first = [worker for worker in self.workers if worker.assignment.local_rank == 0]
        watch = asyncio.create_task(self._watch_fetch(first))
        try:
            folders = await self._all({worker: worker.actor.fetch.remote() for worker in first})
        finally:
            watch.cancel()
        self.state = "loads the model"
        return {worker.assignment.node: folder for worker, folder in zip(first, folders, strict=True)}

    async def _watch_fetch(self, workers: Sequence[Worker]) -> None:
        """Set `state` to the progress of the downloads, until cancelled."""
        while True:
            with contextlib.suppress(ray.exceptions.RayError):  # `_all` raises this error, too
                progress: list[str] = await asyncio.gather(
                    *(worker.actor.fetch_progress.remote() for worker in workers)
                )
                self.state = "; ".join(dict.fromkeys(filter(None, progress))) or self.state
            await asyncio.sleep(FETCH_PROGRESS_S)

    async def _start(self, configs: dict[Worker, RankConfig]) -> list[EngineRecord]:
        tp_size = self._launch.tensor_parallel_size
        followers = [worker for worker in self.workers if worker.rank % tp_size]
        pids = await self._all({worker: worker.actor.follow.remote(configs[worker]) for worker in followers})
        engines = await self._all(
            {worker: worker.actor.lead.remote(configs[worker]) for worker in self.leaders},
            {worker: worker.actor.run.remote() for worker in followers},
        )
        size = tp_size - 1
        return [
            msgspec.structs.replace(engine, follower_pids=pids[index * size : (index + 1) * size])
            for index, engine in enumerate(engines)
        ]

    async def _all(self, answers: dict[Worker, Any], runs: dict[Worker, Any] | None = None) -> list[Any]:
        """Wait for all answers. Raises `GroupCannotStart` as soon as one fails or one of the `runs` ends."""
        tasks = {asyncio.ensure_future(answer): worker for worker, answer in answers.items()}
        ends = {asyncio.ensure_future(run): worker for worker, run in (runs or {}).items()}
        waiting = set(tasks)
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting | set(ends), return_when=asyncio.FIRST_COMPLETED)
                if failed := [task for task in done if task in ends or task.exception() is not None]:
                    raise self._cannot_start({**tasks, **ends}, failed)
                waiting -= done
        finally:
            for task in (*tasks, *ends):
                task.cancel()
        return [task.result() for task in tasks]

    def _cannot_start(
        self, workers: dict[asyncio.Future[Any], Worker], failed: Sequence[asyncio.Future[Any]]
    ) -> Exception:
        error = failed[0].exception()
        has_died = any(isinstance(task.exception(), ray.exceptions.RayActorError) for task in failed)
        if self._launch.world_size == 1 and isinstance(error, Exception) and not (has_died and _full_disks()):
            return error
        what = "; ".join(f"rank {workers[task].rank} {describe_end(task.exception())}" for task in failed)
        return GroupCannotStart(f"group {self._launch.group_id} of {self._launch.world_size} ranks: {what}")


def rank_configs(
    assignments: Sequence[RankAssignment], endpoints: Sequence[RankEndpoints], tp_size: int
) -> list[RankConfig]:
    """Return the configuration of each rank, given the endpoints that each has opened."""
    if len(assignments) == 1:
        return [RankConfig()]
    gpus: dict[str, tuple[str, ...]] = {}
    for assignment, opened in zip(assignments, endpoints, strict=True):
        gpus[assignment.node] = gpus.get(assignment.node, ()) + opened.gpus
    rendezvous = endpoints[0].rendezvous
    return [
        RankConfig(rendezvous, endpoints[each.rank - each.rank % tp_size].group, gpus[each.node])
        for each in assignments
    ]


def describe_end(error: BaseException | None) -> str:
    """Describe how a rank's process ended, given the error of its `run`, or None if it ended by itself."""
    if error is None:
        return "ended"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"failed: {lines[-1]}"
    return "; ".join([f"died: {lines[0]}", *_full_disks()])


def _full_disks() -> list[str]:
    """Describe the full disks of this node, where most ranks of the group run: Ray reports only dead processes."""
    return [str(disk) for disk in full_disks(ray.get_runtime_context().get_temp_dir())]
