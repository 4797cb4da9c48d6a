"""The Ray actor of one rank of an engine group: one process, one device.

Importing this module loads no torch: replicas import the class, but only the actor's own process builds the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from typing import TYPE_CHECKING

import msgspec
import ray

from baton.cluster.contracts import DirectorySnapshot, EnginePulse, EngineRecord, EngineTrace
from baton.cluster.logs import configure
from baton.cluster.membership.directory_client import DirectoryClient
from baton.cluster.process_metrics import MetricsExporter
from baton.engine.core.engine import EngineCore
from baton.engine.parallel.member import Member
from baton.kv_transfer.settings import LocalEngine

from .kv_resources import KVResources, follow_leader
from .launch import EngineLaunch, GroupEndpoints, RankAssignment, RankConfig, RankEndpoints
from .metrics import EngineMetrics
from .profiler import EngineProfiler
from .server import EngineServer

if TYPE_CHECKING:
    from baton.engine.parallel.rendezvous import Rendezvous
    from baton.engine.startup.build import Engine

logger = logging.getLogger(__name__)

WATCH_RETRY_S = 0.5
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
        self._engine: Engine | None = None
        self._server: EngineServer | None = None
        self._following: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._exporter: MetricsExporter | None = None
        self._profiler: EngineProfiler | None = None
        dp_rank = assignment.rank // launch.tensor_parallel_size
        engine_id = launch.group_id if self._config.data_parallel_size == 1 else f"{launch.group_id}-{dp_rank}"
        self._me = LocalEngine(engine_id, secrets.randbits(63), ray.util.get_node_ip_address(), launch.key)
        self._kv = KVResources(launch, self._me, self._wake)

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
        record = await asyncio.to_thread(self._build, self._member(config))
        self._watcher = asyncio.create_task(self._watch())
        server = self._server
        assert server is not None, "it was built"
        self._profiler = EngineProfiler(
            self._me.engine_id, self._me.host, lambda work: asyncio.wrap_future(server.run_between_steps(work))
        )
        return msgspec.structs.replace(record, metrics_address=self._export_metrics())

    async def run(self) -> None:
        """Wait for the end of this rank. Raises the error that ended it."""
        if self._following is not None:
            await asyncio.shield(self._following)
            return
        assert self._server is not None, "leading comes first"
        assert self._watcher is not None, "leading comes first"
        ended = asyncio.shield(asyncio.wrap_future(self._server.ended))
        await asyncio.wait({ended, self._watcher}, return_when=asyncio.FIRST_COMPLETED)
        # Without its watcher, the engine would not notice new or lost gateways and peers.
        if self._watcher.done() and not self._watcher.cancelled():
            self._watcher.result()
        await ended

    async def pulse(self) -> EnginePulse:
        """Return the state of the engine. The step loop that it describes runs in another thread."""
        assert self._server is not None, "leading comes first"
        return self._server.pulse()

    async def start_profile(self) -> EngineTrace | None:
        """Begin a trace of the engine, and return where it will be; None for a follower."""
        if self._profiler is None:
            return None
        return await self._profiler.start()

    async def stop_profile(self) -> EngineTrace | None:
        """End the trace and return it; None if there is none."""
        return None if self._profiler is None else await self._profiler.stop()

    async def return_requests(self) -> None:
        """See `EngineServer.return_requests`."""
        assert self._server is not None, "leading comes first"
        self._server.return_requests()

    async def stop(self) -> None:
        """End a leader's engine, and with it the ranks that follow it; then `run` returns."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
        await asyncio.to_thread(self._kv.close)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
        if self._exporter is not None:
            await self._exporter.close()

    def _note_fetch(self, progress: str) -> None:
        self._fetch_progress = progress

    def _export_metrics(self) -> str:
        """Start to answer scrapes, and return the address for them."""
        assert self._server is not None
        launch, server = self._launch, self._server
        labels = [launch.spec.served_model_id, self._me.engine_id, launch.role]
        registry = EngineMetrics(labels, lambda: server.status, server.counters)
        self._exporter = MetricsExporter(registry, host=self._me.host, key=launch.key)
        self._exporter.start()
        return self._exporter.address

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

    def _build(self, member: Member) -> EngineRecord:
        from baton.engine.startup.build import build_engine

        connect = self._kv.connect if self._launch.transfers_kv else None
        open_tiers = self._kv.open_tiers if self._launch.tiers is not None else None
        try:
            engine = build_engine(self._config, connect, member, open_tiers=open_tiers)
        except BaseException:
            self._kv.abandon()
            raise
        self._engine = engine
        server = self._serve(engine.core)
        # On CPUs, the thread that compiles grammars would compete with the model.
        if engine.grammars is not None and engine.region.device != "cpu":
            engine.grammars.start()
        return self._record(engine, server)

    def _serve(self, core: EngineCore) -> EngineServer:
        self._server = EngineServer(
            core,
            self._me,
            heartbeat_timeout_s=self._launch.spec.gateway.engine_heartbeat_timeout_s,
            transfers=lambda: None if self._kv.connector is None else self._kv.connector.stats(),
        )
        core.when_woken(self._server.wake)
        self._server.start()
        return self._server

    def _record(self, engine: Engine, server: EngineServer) -> EngineRecord:
        """Return the engine's entry for the directory."""
        launch = self._launch
        return EngineRecord(
            engine_id=self._me.engine_id,
            group_id=launch.group_id,
            epoch=self._me.epoch,
            role=launch.role,
            rank=-1,
            node_id=ray.get_runtime_context().get_node_id(),
            node_ip=self._me.host,
            pid=os.getpid(),
            address=server.address,
            kv_address="" if self._kv.connector is None else self._kv.connector.address,
            fingerprint=engine.caches.fingerprint,
            model_id=launch.spec.served_model_id,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.steps.max_num_seqs,
            max_num_batched_tokens=engine.steps.max_num_batched_tokens,
            num_blocks=engine.num_blocks,
            num_tier_blocks=0 if self._kv.tiers is None else self._kv.tiers.num_slots,
        )

    def _wake(self) -> None:
        if self._server is not None:  # transfers may call this before the engine serves
            self._server.wake()

    async def _watch(self) -> None:
        """Follow the directory's snapshots: abort requests of lost gateways, close connections to lost peers."""
        directory, version = DirectoryClient(self._launch.app), -1
        while True:
            try:
                snapshot = await directory.watch(version)
            except ray.exceptions.RayError as error:
                logger.warning("the directory does not answer, asking again: %s", type(error).__name__)
                await asyncio.sleep(WATCH_RETRY_S)
                continue
            if snapshot.version != version:
                version = snapshot.version
                self._apply(snapshot)

    def _apply(self, snapshot: DirectorySnapshot) -> None:
        from baton.kv_transfer.settings import PeerInfo

        assert self._server is not None
        self._server.keep_gateways(gateway.identity for gateway in snapshot.gateways)
        if self._kv.connector is not None:
            peers = [
                PeerInfo(record.engine_id, record.epoch, record.kv_address, record.fingerprint)
                for record in snapshot.engines
                if record.role is self._launch.role.complement
            ]
            self._kv.connector.peers_changed(peers)


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
