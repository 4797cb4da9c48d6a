"""Whole engines on CPU, one process a rank, that hand requests over to each other over NIXL."""

from __future__ import annotations

import functools
import multiprocessing.connection
import time
from collections.abc import Sequence
from typing import Any

from engine_process import DEFAULT_SETTINGS, FORKING

from baton.engine.build import build_engine, follow
from baton.engine.config import EngineConfig
from baton.engine.core.layout import KVRegion
from baton.engine.core.messages import EngineOutput, EngineRequest, EngineStats
from baton.engine.parallel.member import Member
from baton.engine.parallel.rendezvous import Meeting, Rendezvous
from baton.kv_transfer.connector import PeerInfo, TransferConnector, TransferSettings, TransferStats
from baton.kv_transfer.crew import CrewSocket
from baton.kv_transfer.crew_member import CrewMember
from baton.kv_transfer.curve import ClusterKey
from baton.kv_transfer.host_buffer import HostBuffer, open_connector

START_S = 90.0
ANSWER_S = 60.0
_CREW = "kv-crew"


class _Leader:
    """Rank 0. Every public method is an order."""

    def __init__(
        self, config: EngineConfig, member: Member, name: str, key: ClusterKey, settings: TransferSettings
    ) -> None:
        crew = None
        if member.tensor_parallel_size > 1:
            crew = CrewSocket(member.tensor_parallel_size, member.host, key)
            Meeting(member.rendezvous, member.rank, timeout_s=START_S).put(_CREW, crew.address)

        def connect(region: KVRegion) -> TransferConnector | HostBuffer:
            self._connector = open_connector(
                region, engine_id=name, epoch=1, host=member.host, key=key, settings=settings, crew=crew
            )
            return self._connector

        self._engine = build_engine(config, connect, member)
        self.info = PeerInfo(name, 1, self._connector.address, self._engine.layout.fingerprint)

    def meet(self, peers: list[PeerInfo]) -> None:
        self._connector.peers_changed(peers)

    def num_ready(self) -> int:
        return self._connector.stats().peers_ready

    def run(self, requests: Sequence[EngineRequest]) -> dict[str, list[EngineOutput]]:
        """All outputs of each request, in order."""
        outputs: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
        for request in requests:
            self._engine.core.add(request)
        while any(not steps or steps[-1].finish_reason is None for steps in outputs.values()):
            news = self._engine.core.step()
            for step in news:
                outputs[step.request_id].append(step)
            if not news:
                time.sleep(1e-3)  # it waits for blocks, and others need the core
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


def _lead(pipe: multiprocessing.connection.Connection, *arguments: Any) -> None:
    leader = _Leader(*arguments)
    pipe.send(leader.info)
    while True:
        method, values = pipe.recv()
        pipe.send(getattr(leader, method)(*values))


def _follow(config: EngineConfig, member: Member, name: str, key: ClusterKey) -> None:
    def connect(region: KVRegion) -> CrewMember:
        leader = Meeting(member.rendezvous, member.rank, timeout_s=START_S).get(_CREW)
        return CrewMember(region, rank=member.tp_rank, leader=leader, engine_id=name, key=key)

    follow(config, member, connect)


class GroupEngine:
    """Orders by name: `engine.run(requests)`. Its processes start at once and are killed by `kill`."""

    def __init__(
        self,
        name: str,
        key: ClusterKey,
        size: int,
        engine_args: dict[str, Any],
        settings: TransferSettings = DEFAULT_SETTINGS,
    ) -> None:
        self._rendezvous = Rendezvous()
        config = EngineConfig.from_args({**engine_args, "tensor_parallel_size": size})
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
            FORKING.Process(target=_lead, args=(theirs, config, members[0], name, key, settings), daemon=True),
            *(FORKING.Process(target=_follow, args=(config, member, name, key), daemon=True) for member in members[1:]),
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
