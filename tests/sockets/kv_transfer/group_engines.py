"""Whole engines on CPUs, one process per rank, that hand requests over by NIXL, or have KV tiers."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing.connection
import time
from collections.abc import Sequence
from typing import Any

from baton.engine.config import EngineConfig
from baton.engine.core.messages import EngineOutput, EngineRequest, EngineStats
from baton.engine.core.regions import CacheRegion
from baton.engine.core.tiers import TierStats
from baton.engine.net.curve import ClusterKey
from baton.engine.parallel.member import Member
from baton.engine.parallel.rendezvous import Rendezvous, RendezvousClient
from baton.engine.startup.build import build_engine, follow
from baton.kv_transfer.connector import PeerInfo, TransferConnector, TransferSettings, TransferStats
from baton.kv_transfer.group.rpc import GroupRank, GroupSocket
from baton.kv_transfer.settings import LocalEngine, TierSettings
from baton.kv_transfer.staging.group_copies import follow_connector
from baton.kv_transfer.staging.host_buffer import HostBufferConnector, open_connector
from baton.kv_transfer.tiers.group import follow_tiers
from baton.kv_transfer.tiers.store import TierStore

from ...helpers.process_context import FORKING
from .engine_process import DEFAULT_SETTINGS

START_S = 90.0
ANSWER_S = 60.0
_READS, _COPIES, _TIERS = "kv-reads", "kv-copies", "kv-tiers"


@dataclasses.dataclass(frozen=True)
class Job:
    """The configuration that all ranks of an engine get."""

    config: EngineConfig
    name: str
    key: ClusterKey
    settings: TransferSettings
    tiers: TierSettings | None


class _Leader:
    """Rank 0, whose public methods the test calls through a pipe."""

    def __init__(self, job: Job, member: Member) -> None:
        read_socket = copy_socket = tier_socket = None
        if member.tensor_parallel_size > 1:
            read_socket = GroupSocket(member.tensor_parallel_size, member.host, job.key)
            copy_socket, tier_socket = (
                GroupSocket(member.tensor_parallel_size, member.host, job.key) for _ in range(2)
            )
            rendezvous_client = RendezvousClient(member.rendezvous, member.rank, timeout_s=START_S)
            for what, socket in ((_READS, read_socket), (_COPIES, copy_socket), (_TIERS, tier_socket)):
                rendezvous_client.put(what, socket.address)

        def connect(region: CacheRegion) -> TransferConnector | HostBufferConnector:
            self._connector = open_connector(
                region,
                LocalEngine(job.name, 1, member.host, job.key),
                settings=job.settings,
                read_socket=read_socket,
                copy_socket=copy_socket,
            )
            return self._connector

        def open_tiers(region: CacheRegion) -> TierStore:
            assert job.tiers is not None
            self._store = TierStore(
                region, job.tiers, name=f"{job.name}:tiers", cpu_affinity="any", group_socket=tier_socket
            )
            return self._store

        self._store: TierStore | None = None
        self._engine = build_engine(job.config, connect, member, open_tiers=open_tiers if job.tiers else None)
        self.info = PeerInfo(job.name, 1, self._connector.address, self._engine.region.caches.fingerprint)

    def meet(self, peers: list[PeerInfo]) -> None:
        self._connector.peers_changed(peers)

    def num_ready(self) -> int:
        return self._connector.stats().peers_ready

    def run(self, requests: Sequence[EngineRequest]) -> dict[str, list[EngineOutput]]:
        """Run the requests, and return all outputs of each, in order."""
        outputs: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
        for request in requests:
            self._engine.core.add(request)
        while any(not steps or steps[-1].finish_reason is None for steps in outputs.values()):
            news = self._engine.core.step()
            for step in news:
                outputs[step.request_id].append(step)
            if not news:
                time.sleep(1e-3)  # the engine waits for blocks; other processes need the CPU
        return outputs

    def add(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            self._engine.core.add(request)

    def begin(self, request_id: str, token_id: int) -> None:
        self._engine.core.begin(request_id, 0, token_id)

    def step(self) -> list[EngineOutput]:
        return self._engine.core.step()

    def transfers(self) -> TransferStats:
        return self._connector.stats()

    def stats(self) -> EngineStats:
        self._engine.core.step()
        return self._engine.core.stats()

    def quiet(self) -> TierStats:
        """Step until all blocks that can be stored in tiers are. Return the statistics of tiers."""
        while self._engine.core.scheduler.tier_copies.has_stores:
            self._engine.core.step()
            time.sleep(1e-3)
        stats = self._engine.core.stats()
        assert stats.num_blocks_free == stats.num_blocks
        assert stats.tiers is not None
        return stats.tiers

    def end(self) -> None:
        """Close the parts of the engine in the order in which a server does."""
        self._connector.close()
        if self._store is not None:
            self._store.close()
        self._engine.close()


def _lead(pipe: multiprocessing.connection.Connection, *arguments: Any) -> None:
    leader = _Leader(*arguments)
    pipe.send(leader.info)
    while True:
        method, values = pipe.recv()
        pipe.send(getattr(leader, method)(*values))


def _follow(job: Job, member: Member) -> None:
    def connect(region: CacheRegion) -> list[object]:
        rendezvous_client = RendezvousClient(member.rendezvous, member.rank, timeout_s=START_S)
        me = GroupRank(member.tp_rank, member.tensor_parallel_size, job.key)
        reader = follow_connector(
            region,
            me,
            leader=rendezvous_client.get(_READS),
            copies=rendezvous_client.get(_COPIES),
            engine_id=job.name,
            settings=job.settings,
        )
        if job.tiers is None:
            return [reader]
        tier_member = follow_tiers(
            region,
            me,
            job.tiers,
            leader=rendezvous_client.get(_TIERS),
            name=f"{job.name}:tiers:{member.tp_rank}",
            cpu_affinity="any",
        )
        return [reader, tier_member]

    follow(job.config, member, connect)


class GroupEngine:
    """The processes of an engine, which start at once. Methods such as `engine.run(requests)` call rank 0."""

    def __init__(
        self,
        name: str,
        key: ClusterKey,
        size: int,
        engine_args: dict[str, Any],
        settings: TransferSettings = DEFAULT_SETTINGS,
        tiers: TierSettings | None = None,
    ) -> None:
        self._rendezvous = Rendezvous()
        job = Job(EngineConfig.from_args({**engine_args, "tensor_parallel_size": size}), name, key, settings, tiers)
        self._pipe, theirs = FORKING.Pipe()
        members = [
            Member(
                rank=rank,
                tensor_parallel_size=size,
                rendezvous=self._rendezvous.address if size > 1 else "",
                num_local=size,
                local_rank=rank,
                start_timeout_s=START_S,
            )
            for rank in range(size)
        ]
        self._processes = [
            FORKING.Process(target=_lead, args=(theirs, job, members[0]), daemon=True),
            *(FORKING.Process(target=_follow, args=(job, member), daemon=True) for member in members[1:]),
        ]
        for process in self._processes:
            process.start()
        theirs.close()

    @functools.cached_property
    def info(self) -> PeerInfo:
        return self._answer(START_S)

    def __getattr__(self, method: str) -> Any:
        def order(*values: Any) -> Any:
            assert self.info
            self._pipe.send((method, values))
            return self._answer(ANSWER_S)

        return order

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"the engine did not answer within {timeout_s:g} s")
        return self._pipe.recv()
