"""Real engine cores with fake runners, each behind its ZMQ socket, and any number of gateways that use them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import msgspec

from baton.cluster.contracts import EngineRecord, Role
from baton.cluster.engine_client import ZmqEngineClient
from baton.cluster.engines.server import EngineServer
from baton.cluster.gateway.app import create_app
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.cluster.gateway.settings import GatewaySettings, QueueLimits
from baton.engine.core.block_log import BlockLog
from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.engine import EngineCore
from baton.engine.core.messages import EngineOutput, EngineRequest, EngineStats
from baton.engine.core.pace import StepTimes
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.settings import LocalEngine

from ...helpers.fake_cluster import FakeConnector, Wire
from ...helpers.fake_runner import FakeRunner
from ...helpers.fakes import ListedSource
from ...helpers.gateway_service import until
from ...helpers.tiny_model import MAX_MODEL_LEN, tiny_model, tiny_tokenizer

KEY = ClusterKey.generate()
MODEL = tiny_model(tiny_tokenizer())
CONFIG = EngineCoreConfig(
    num_blocks=256,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    max_model_len=MAX_MODEL_LEN,
    vocab_size=MODEL.vocab_size,
    eos_token_ids=list(MODEL.eos_token_ids),
)


class WiredEngine:
    """An engine behind an `EngineServer`. It runs no step while `runs` is cleared; its thread hangs while `moves` is
    cleared.
    """

    def __init__(self, rank: int, role: Role, wire: Wire) -> None:
        self.runs, self.moves = threading.Event(), threading.Event()
        self.runs.set()
        self.moves.set()
        self.hangs_at_work = False  # the next step with work clears `moves`
        self._hangs = False
        self.taken: list[EngineRequest] = []
        runner = FakeRunner(CONFIG, {})
        self._connector = FakeConnector(wire, runner.memory)
        self._core = EngineCore(Scheduler(CONFIG, self._connector), runner)
        name = f"{role}-{rank}"
        self.server = EngineServer(self, LocalEngine(name, 100 + rank, "127.0.0.1", KEY))
        self.record = EngineRecord(
            engine_id=name,
            group_id=name,
            epoch=100 + rank,
            role=role,
            rank=rank,
            node_id="node",
            node_ip="127.0.0.1",
            pid=rank,
            address=self.server.address,
            kv_address="",
            fingerprint="f",
            model_id="tiny",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            num_blocks=CONFIG.num_blocks,
        )
        self.server.start()

    async def hang(self) -> None:
        """Leave messages in the socket until `moves` is set."""
        self.moves.clear()
        self.server.wake()
        await until(lambda: self._hangs)

    @property
    def num_unheard(self) -> int:
        return self.server.socket.num_submitted

    def add(self, request: EngineRequest, received_s: float | None = None) -> None:
        self.taken.append(request)
        self._core.add(request, received_s)

    def begin(self, request_id: str, generation: int, token_id: int) -> None:
        self._core.begin(request_id, generation, token_id)

    def abort(self, request_id: str, generation: int | None = None) -> None:
        self._core.abort(request_id, generation)

    def wait_s(self) -> float:
        return self._core.wait_s()

    def step(self) -> list[EngineOutput]:
        if self.hangs_at_work and self._core.has_work():
            self.hangs_at_work = False
            self.moves.clear()
        self._hangs = not self.moves.is_set()
        self.moves.wait()
        self._hangs = False
        return self._core.step() if self.runs.is_set() else []

    def has_work(self) -> bool:
        """Return whether there are requests or transfers: the fake connector does not wake the engine for these."""
        return self.runs.is_set() and (self._core.has_work() or self._connector.is_busy)

    def stats(self) -> EngineStats:
        """Leave out the times of steps: on a busy machine they would make one engine look slower than others."""
        return msgspec.structs.replace(self._core.stats(), step_times=StepTimes())

    def block_log(self) -> BlockLog:
        return self._core.block_log()


@dataclass(frozen=True, eq=False)
class WiredGateway:
    engines: list[WiredEngine]
    http: httpx.AsyncClient
    client: ZmqEngineClient
    metrics: GatewayMetrics

    async def complete(self, prompt: list[int], session_id: str | None = None, max_tokens: int = 3) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        headers = {} if session_id is None else {"x-session-id": session_id}
        return await self.http.post("/v1/completions", json=body, headers=headers)

    async def hear_that_all_are_idle(self) -> None:
        """Wait until every engine is idle and its newest status has arrived at this gateway.

        An answer may come before the status that no longer counts its request. Until then the engine looks busy to
        gateways that did not send the request, and is passed over for one with less in its cache.
        """

        def all_are_idle() -> bool:
            newest = {engine.record.engine_id: engine.stats() for engine in self.engines}
            heard = {view.record.engine_id: view.stats for view in self.client.engines()}
            return heard == newest and not any(stats.num_requests for stats in newest.values())

        await until(all_are_idle)


class WiredFleet:
    def __init__(self, *roles: Role, limits: QueueLimits = QueueLimits()) -> None:
        wire = Wire()
        self.engines = [WiredEngine(rank, role, wire) for rank, role in enumerate(roles)]
        self._limits = limits

    @asynccontextmanager
    async def gateway(self, name: str) -> AsyncIterator[WiredGateway]:
        """Start a gateway, wait until it knows all engines, and close it on exit."""
        source = ListedSource()
        source.show(*(engine.record for engine in self.engines))
        client = ZmqEngineClient(source, KEY, name, queue=self._limits.bound)
        await client.start()
        metrics = GatewayMetrics("tiny", client.engines)
        app = create_app(client, MODEL, GatewaySettings(gateway_id=name, queue_limits=self._limits), metrics=metrics)
        try:
            await until(lambda: len(client.engines()) == len(self.engines))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g", timeout=20) as http:
                yield WiredGateway(self.engines, http, client, metrics)
        finally:
            await client.close()

    def close(self) -> None:
        for engine in self.engines:
            engine.moves.set()
            engine.runs.set()
            engine.server.close()
