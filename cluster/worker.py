"""The Ray actor that holds an engine: one process, one device.

Importing this module loads no torch: replicas name the class, only the actor's own process builds the engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from baton.engine.core.connector import KVConnector
from baton.engine.core.layout import KVRegion
from baton.kv_transfer.curve import ClusterKey

from .contracts import DirectorySnapshot, EngineRecord, Role
from .directory import DirectoryWatch
from .engine_server import EngineServer
from .spec import FleetSpec

if TYPE_CHECKING:
    from baton.kv_transfer.connector import TransferConnector

logger = logging.getLogger(__name__)

WATCH_RETRY_S = 0.5


@dataclass(frozen=True)
class EngineLaunch:
    """Everything that a worker needs to become one engine of an application."""

    spec: FleetSpec
    role: Role
    engine_id: str
    app: str
    key: ClusterKey


class EngineWorker:
    """Builds one engine and serves it until its process ends.

    `start` returns when the engine is ready. `run` returns only when it has ended: whoever watches the engine keeps a
    reference to an unanswered `run`, which Ray fails the moment the process dies.
    """

    def __init__(self, launch: EngineLaunch) -> None:
        self._launch = launch
        self._epoch = secrets.randbits(63)
        self._server: EngineServer | None = None
        self._connector: TransferConnector | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> EngineRecord:
        """Raises what building the engine raises."""
        configure_threads(self._launch, num_nodes=sum(node["Alive"] for node in ray.nodes()))
        record = await asyncio.to_thread(self._build, ray.util.get_node_ip_address())
        self._watcher = asyncio.create_task(self._watch())
        return record

    async def run(self) -> None:
        """Waits for the end of the engine. Raises what ended it."""
        assert self._server is not None, "start comes first"
        await asyncio.shield(asyncio.wrap_future(self._server.ended))

    async def stalled_s(self) -> float:
        """See `EngineServer.stalled_s`. Answered by another thread than the one that it tells about."""
        assert self._server is not None, "start comes first"
        return self._server.stalled_s()

    async def stop(self) -> None:
        """Ends the engine; `run` returns."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
        if self._connector is not None:
            await asyncio.to_thread(self._connector.close)

    def _build(self, host: str) -> EngineRecord:
        # Here rather than at the top: torch and NIXL load with them, in this process only.
        from baton.engine.build import build_engine
        from baton.kv_transfer.connector import TransferConnector

        launch = self._launch

        def connect(region: KVRegion) -> KVConnector:
            self._connector = TransferConnector(
                region,
                engine_id=launch.engine_id,
                epoch=self._epoch,
                host=host,
                key=launch.key,
                settings=launch.spec.transfer_settings(),
                wake=self._wake,
            )
            return self._connector

        hands_over = launch.role is not Role.UNIFIED
        engine = build_engine(launch.spec.engine_config(launch.role), connect if hands_over else None)
        self._server = EngineServer(
            engine.core,
            engine_id=launch.engine_id,
            epoch=self._epoch,
            key=launch.key,
            host=host,
            transfers=lambda: None if self._connector is None else self._connector.stats(),
        )
        self._server.start()
        return EngineRecord(
            engine_id=launch.engine_id,
            epoch=self._epoch,
            role=launch.role,
            rank=-1,
            node_id=ray.get_runtime_context().get_node_id(),
            node_ip=host,
            pid=os.getpid(),
            address=self._server.address,
            kv_address="" if self._connector is None else self._connector.address,
            fingerprint=engine.layout.fingerprint,
            model_id=launch.spec.served_model_id,
            max_model_len=engine.max_model_len,
            num_blocks=engine.num_blocks,
        )

    def _wake(self) -> None:
        if self._server is not None:  # transfers can have news before the engine serves
            self._server.wake()

    async def _watch(self) -> None:
        """Follows the directory: gateways that left lose their requests, peers that left their connections."""
        directory, version = DirectoryWatch(self._launch.app), -1
        while True:
            try:
                snapshot = await directory.watch(version)
            except ray.exceptions.RayError as error:
                logger.warning("the directory does not answer, asking again: %s", type(error).__name__)
                await asyncio.sleep(WATCH_RETRY_S)
                continue
            if snapshot.version > version:
                version = snapshot.version
                self._apply(snapshot)

    def _apply(self, snapshot: DirectorySnapshot) -> None:
        from baton.kv_transfer.settings import PeerInfo

        assert self._server is not None
        self._server.keep_gateways(snapshot.gateways)
        if self._connector is not None:
            peers = [
                PeerInfo(record.engine_id, record.epoch, record.kv_address, record.fingerprint)
                for record in snapshot.engines
                if record.kv_address and record.epoch != self._epoch
            ]
            self._connector.peers_changed(peers)


# A team that sleeps between two ops of a step is late for each (half the speed, measured); one that spins for longer
# than that takes cores from others. This many spins are some tens of microseconds.
OPENMP_SPINS = "20000"


def configure_threads(launch: EngineLaunch, num_nodes: int) -> None:
    """Sets this process's OpenMP threads. Must come before torch is loaded, which reads the variables once.

    By default the cores are shared out among the application's engines, which are taken to be spread evenly over the
    nodes: teams that outnumber the cores starve each other.
    """
    config = launch.spec.engine_config(launch.role)
    engines_here = -(-launch.spec.num_engines // num_nodes)
    threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) // engines_here)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["GOMP_SPINCOUNT"] = OPENMP_SPINS
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
