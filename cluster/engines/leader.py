"""The engine of a leader, served to gateways: its server, hand-offs, tiers, metrics, profiler, view of the directory.

LeadingRank() ──> start ──> run ──> close
 builds the      metrics,   returns at
 engine, serves  directory  its end
"""

from __future__ import annotations

import asyncio
import logging
import os

import ray

from baton.cluster.contracts import DirectorySnapshot, EngineRecord
from baton.cluster.membership.directory_client import DirectoryClient
from baton.cluster.process_metrics import MetricsExporter
from baton.engine.config import EngineConfig
from baton.engine.parallel.member import Member
from baton.kv_transfer.settings import LocalEngine, PeerInfo

from .kv_resources import KVResources
from .launch import EngineLaunch
from .metrics import EngineMetrics
from .profiler import EngineProfiler
from .server import EngineServer

logger = logging.getLogger(__name__)

WATCH_RETRY_S = 0.5


class LeadingRank:
    """A leader's engine and what serves it. `server` and `profiler` may be used once it is constructed."""

    def __init__(
        self, launch: EngineLaunch, me: LocalEngine, config: EngineConfig, member: Member, kv: KVResources
    ) -> None:
        """Build the engine, which may take minutes, and begin to serve it. If that fails, `kv` is closed."""
        from baton.engine.startup.build import build_engine

        self._launch, self._me, self._kv = launch, me, kv
        connect = kv.connect if launch.transfers_kv else None
        open_tiers = kv.open_tiers if launch.tiers is not None else None
        try:
            self._engine = engine = build_engine(config, connect, member, open_tiers=open_tiers)
        except BaseException:
            kv.abandon()
            raise
        self.server = EngineServer(
            engine.core,
            me,
            heartbeat_timeout_s=launch.spec.gateway.engine_heartbeat_timeout_s,
            transfers=lambda: None if kv.connector is None else kv.connector.stats(),
        )
        engine.core.when_woken(self.server.wake)
        kv.wake = self.server.wake
        self.server.start()
        # On CPUs, the thread that compiles grammars would compete with the model.
        if engine.grammars is not None and engine.region.device != "cpu":
            engine.grammars.start()
        self.profiler = EngineProfiler(
            me.engine_id, me.host, lambda work: asyncio.wrap_future(self.server.run_between_steps(work))
        )

    def start(self) -> EngineRecord:
        """Answer scrapes and follow the directory, on the running loop. Return the engine's entry for the directory."""
        launch, engine, kv = self._launch, self._engine, self._kv
        labels = [launch.spec.served_model_id, self._me.engine_id, launch.role]
        registry = EngineMetrics(labels, lambda: self.server.status, self.server.counters)
        self._exporter = MetricsExporter(registry, host=self._me.host, key=launch.key)
        self._exporter.start()
        self._watcher = asyncio.create_task(self._watch())
        return EngineRecord(
            engine_id=self._me.engine_id,
            group_id=launch.group_id,
            epoch=self._me.epoch,
            role=launch.role,
            rank=-1,
            node_id=ray.get_runtime_context().get_node_id(),
            node_ip=self._me.host,
            pid=os.getpid(),
            address=self.server.address,
            kv_address="" if kv.connector is None else kv.connector.address,
            metrics_address=self._exporter.address,
            fingerprint=engine.region.caches.fingerprint,
            model_id=launch.spec.served_model_id,
            max_model_len=engine.core.config.max_model_len,
            max_num_seqs=engine.core.config.max_num_seqs,
            max_num_batched_tokens=engine.core.config.max_num_batched_tokens,
            num_blocks=engine.core.config.num_blocks,
            num_tier_blocks=0 if kv.tiers is None else kv.tiers.num_slots,
        )

    async def run(self) -> None:
        """Wait until the engine ends. Raises the error that ended it."""
        ended = asyncio.shield(asyncio.wrap_future(self.server.ended))
        await asyncio.wait({ended, self._watcher}, return_when=asyncio.FIRST_COMPLETED)
        # Without its watcher, the engine would not notice new or lost gateways and peers.
        if self._watcher.done() and not self._watcher.cancelled():
            self._watcher.result()
        await ended

    async def close(self) -> None:
        """End the engine, and with it the ranks that follow it; then `run` returns."""
        self._watcher.cancel()
        await asyncio.to_thread(self.server.close)
        await asyncio.to_thread(self._kv.close)
        await asyncio.to_thread(self._engine.close)
        await self._exporter.close()

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
        self.server.keep_gateways(gateway.identity for gateway in snapshot.gateways)
        if self._kv.connector is not None:
            peers = [
                PeerInfo(record.engine_id, record.epoch, record.kv_address, record.fingerprint)
                for record in snapshot.engines
                if record.role is self._launch.role.complement
            ]
            self._kv.connector.peers_changed(peers)
