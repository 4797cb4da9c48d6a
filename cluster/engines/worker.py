"""The Ray actor of one rank of an engine group: one process, one device.

Importing this module loads no torch: replicas import the class, but only the actor's own process builds the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from typing import TYPE_CHECKING

import ray

from baton.cluster.contracts import EnginePulse, EngineRecord, EngineTrace
from baton.cluster.logs import configure
from baton.engine.parallel.member import Member
from baton.kv_transfer.settings import LocalEngine

from .kv_resources import KVResources, follow_leader
from .launch import EngineLaunch, GroupEndpoints, RankAssignment, RankConfig, RankEndpoints
from .leader import LeadingRank

if TYPE_CHECKING:
    from baton.engine.parallel.rendezvous import Rendezvous

# If OpenMP threads sleep between two ops of a step, each op starts late (half the speed, as measured); if they spin
# longer than that gap, they take cores from other processes. This many spins take some tens of microseconds.
OPENMP_SPINS = "20000"


class EngineWorker:
    """One rank of a group: it builds an engine and serves it (a leader), or follows its leader.

    Call `fetch` (on one rank of each machine) and `open`, then `lead` or `follow`. `run` returns only when the rank has
    ended: the caller keeps the reference to the unanswered call, which Ray fails the moment the process dies.
    """

    def __init__(self, launch: EngineLaunch, assignment: RankAssignment) -> None:
        self._launch, self._assignment = launch, assignment
        configure(launch.spec.logging, "engine", f"{launch.group_id}/{assignment.rank}")
        self._config = launch.spec.engine_config(launch.role)
        self._rendezvous: Rendezvous | None = None
        self._fetch_progress = ""
        self._leader: LeadingRank | None = None
        self._following: asyncio.Task[None] | None = None
        dp_rank = assignment.rank // launch.tensor_parallel_size
        engine_id = launch.group_id if self._config.data_parallel_size == 1 else f"{launch.group_id}-{dp_rank}"
        self._me = LocalEngine(engine_id, secrets.randbits(63), ray.util.get_node_ip_address(), launch.key)
        self._kv = KVResources(launch, self._me)

    async def fetch(self) -> str:
        """Download what is missing of a model on the Hub, and return its folder. Raises `ModelNotFetched`."""
        from baton.engine.startup.model_config import fetch_models

        return (await asyncio.to_thread(fetch_models, self._config, self._note_fetch)).model

    async def fetch_progress(self) -> str:
        """Return the progress of the model's download; empty unless one has been running for a while."""
        return self._fetch_progress

    async def open(self) -> RankEndpoints:
        """Open the sockets to which other ranks connect, and return their addresses."""
        _configure_threads(self._launch, num_nodes=sum(node["Alive"] for node in ray.nodes()))
        return await asyncio.to_thread(self._open)

    async def follow(self, config: RankConfig) -> int:
        """Start to follow, and return this process's id. Errors of the follower are raised by `run`."""
        self._following = asyncio.create_task(asyncio.to_thread(self._follow, self._member(config), config.group))
        return os.getpid()

    async def lead(self, config: RankConfig) -> EngineRecord:
        """Build the engine, and return its record when it is ready. Raises the error if that fails."""
        member = self._member(config)  # first: it completes `self._config`
        self._leader = await asyncio.to_thread(LeadingRank, self._launch, self._me, self._config, member, self._kv)
        return self._leader.start()

    async def run(self) -> None:
        """Wait for the end of this rank. Raises the error that ended it."""
        if self._following is not None:
            await asyncio.shield(self._following)
            return
        await self._leading.run()

    async def pulse(self) -> EnginePulse:
        """Return the state of the engine. The step loop that it describes runs in another thread."""
        return self._leading.server.pulse()

    async def start_profile(self) -> EngineTrace | None:
        """Begin a trace of the engine, and return where it will be; None for a follower."""
        return None if self._leader is None else await self._leader.profiler.start()

    async def stop_profile(self) -> EngineTrace | None:
        """End the trace and return it; None if there is none."""
        return None if self._leader is None else await self._leader.profiler.stop()

    async def return_requests(self) -> None:
        """See `EngineServer.return_requests`."""
        self._leading.server.return_requests()

    async def stop(self) -> None:
        """End a leader's engine, and with it the ranks that follow it; then `run` returns."""
        if self._leader is not None:
            await self._leader.close()

    @property
    def _leading(self) -> LeadingRank:
        assert self._leader is not None, "leading comes first"
        return self._leader

    def _note_fetch(self, progress: str) -> None:
        self._fetch_progress = progress

    def _open(self) -> RankEndpoints:
        rendezvous, group = "", GroupEndpoints()
        size, rank = self._launch.tensor_parallel_size, self._assignment.rank
        if self._launch.world_size > 1 and rank == 0:
            from baton.engine.parallel.rendezvous import Rendezvous  # loads torch, in this process only

            self._rendezvous = Rendezvous(self._me.host)
            rendezvous = self._rendezvous.address
        if size > 1 and rank % size == 0:
            group = self._kv.open_sockets()
        return RankEndpoints(rendezvous, group, tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"]))

    def _member(self, config: RankConfig) -> Member:
        self._config = self._config.model_copy(update={"model": config.model, "revision": None})
        if config.gpus:  # before CUDA starts in this process
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(config.gpus)
        return Member(
            rank=self._assignment.rank,
            tensor_parallel_size=self._config.tensor_parallel_size,
            data_parallel_size=self._config.data_parallel_size,
            rendezvous=config.rendezvous,
            host=self._me.host,
            device_index=self._assignment.local_rank if config.gpus else None,
            num_local=self._assignment.num_local,
            local_rank=self._assignment.local_rank,
            secure_server=self._launch.key.secure_server,
            secure_client=self._launch.key.secure_client,
        )

    def _follow(self, member: Member, leader: GroupEndpoints) -> None:
        from baton.engine.startup.build import follow

        with contextlib.ExitStack() as ending:
            moves_blocks = leader.reads or leader.tiers
            connect = follow_leader(self._launch, self._me.engine_id, member, leader, ending) if moves_blocks else None
            follow(self._config, member, connect)


def _configure_threads(launch: EngineLaunch, num_nodes: int) -> None:
    """Set the number of this process's OpenMP threads. Must run before torch is loaded, which reads the variables once.

    By default, each node's cores are divided among the application's workers, which are assumed to be spread evenly
    over the nodes: with more threads than cores, workers slow each other down.
    """
    config = launch.spec.engine_config(launch.role)
    workers_here = -(-launch.spec.num_workers // num_nodes)
    threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) // workers_here)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["GOMP_SPINCOUNT"] = OPENMP_SPINS
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
