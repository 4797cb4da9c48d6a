"""Complete fakes of the protocols between components, with faults that tests can set."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from baton.cluster.contracts import DirectorySnapshot, EngineRecord, GatewayRecord, Reach, Role
from baton.cluster.engines.server import EngineServer
from baton.engine.core.block_log import BlockLog, GroupLog
from baton.engine.core.messages import EngineOutput, EngineRequest, EngineStats, FinishReason
from baton.engine.core.pace import StepTimes
from baton.engine.core.sampling import SamplingParams
from baton.engine.net.curve import ClusterKey
from baton.engine.net.sockets import HEARTBEAT_TIMEOUT_S
from baton.kv_transfer.protocol.stats import TransferStats
from baton.kv_transfer.settings import LocalEngine

STEP_S = 0.0005  # a step sleeps as if a device computed, so that other threads run


class CountingEngine:
    """An engine whose answer to every prompt is 1, 2, 3, ...: one token a step and request.

    Clearing `hold` stops all progress; clearing `hang` blocks the step itself; `explode` makes the next step fail.
    """

    def __init__(self) -> None:
        self.hold = threading.Event()
        self.hold.set()
        self.hang = threading.Event()
        self.hang.set()
        self.explode = False
        self.running: dict[str, EngineRequest] = {}
        self.aborted: list[str] = []
        self.aborted_up_to: list[tuple[str, int | None]] = []
        self.begun: list[tuple[str, int, int]] = []
        self.steps = 0
        self._done: dict[str, int] = {}
        self.cached: dict[bytes, int] = {}
        self._moves = GroupLog(self.cached.keys())
        self._log = BlockLog([self._moves])

    def add(self, request: EngineRequest, received_s: float | None = None) -> None:
        self.running[request.request_id] = request
        self._done[request.request_id] = len(request.output_token_ids)

    def begin(self, request_id: str, generation: int, token_id: int) -> None:
        self.begun.append((request_id, generation, token_id))

    def abort(self, request_id: str, generation: int | None = None) -> None:
        self.aborted.append(request_id)
        self.aborted_up_to.append((request_id, generation))
        live = self.running.get(request_id)
        if live is not None and (generation is None or live.generation <= generation):
            del self.running[request_id]

    def wait_s(self) -> float:
        return 0.0

    def step(self) -> list[EngineOutput]:
        self.steps += 1
        self.hang.wait()
        if self.explode:
            raise RuntimeError("the device is gone")
        if not self.hold.is_set():
            return []
        if self.running:
            time.sleep(STEP_S)
        return [self._advance(request) for request in list(self.running.values())]

    def _advance(self, request: EngineRequest) -> EngineOutput:
        self._done[request.request_id] += 1
        token = self._done[request.request_id]
        last = token == request.sampling.max_tokens
        if last:
            del self.running[request.request_id]
        return EngineOutput(
            request_id=request.request_id,
            generation=request.generation,
            token_ids=[token],
            finish_reason=FinishReason.LENGTH if last else None,
        )

    def has_work(self) -> bool:
        return bool(self.running) and self.hold.is_set()

    def store(self, block_hash: bytes) -> None:
        """Store a block as if a request had filled it. To be called only while nothing runs."""
        self.cached[block_hash] = 0
        self._moves.stored(block_hash)

    def evict(self, block_hash: bytes) -> None:
        del self.cached[block_hash]
        self._moves.evicted(block_hash)

    def block_log(self) -> BlockLog:
        return self._log

    def stats(self) -> EngineStats:
        values = dict.fromkeys(EngineStats.__struct_fields__, 0)
        return EngineStats(
            **{
                **values,
                "num_requests_running": len(self.running),
                "experts": None,
                "tiers": None,
                "step_times": StepTimes(),
                "speculation": None,
            }
        )


class ListedSource:
    """A directory that lists what the test says."""

    def __init__(self) -> None:
        self._snapshot = DirectorySnapshot(0, [], [])
        self._changed = asyncio.Event()

    def show(self, *records: EngineRecord) -> None:
        self._snapshot = DirectorySnapshot(self._snapshot.version + 1, list(records), [])
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self, version: int) -> DirectorySnapshot:
        while self._snapshot.version <= version:
            await self._changed.wait()
        return self._snapshot


def serve_engine(
    engine: CountingEngine,
    key: ClusterKey,
    *,
    epoch: int = 1,
    rank: int = 0,
    transfers: Callable[[], TransferStats | None] = lambda: None,
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    host: str = "127.0.0.1",
) -> tuple[EngineServer, EngineRecord]:
    server = EngineServer(
        engine,
        LocalEngine(f"engine-{rank}", epoch, host, key),
        transfers=transfers,
        heartbeat_timeout_s=heartbeat_timeout_s,
    )
    server.start()
    return server, make_record(address=server.address, epoch=epoch, rank=rank)


def make_record(
    *,
    address: str = "",
    epoch: int = 1,
    rank: int = 0,
    engine_id: str | None = None,
    role: Role = Role.UNIFIED,
    node: str = "node",
) -> EngineRecord:
    return EngineRecord(
        engine_id=engine_id or f"engine-{rank}",
        group_id=engine_id or f"engine-{rank}",
        epoch=epoch,
        role=role,
        rank=rank,
        node_id=node,
        node_ip="127.0.0.1",
        pid=1,
        address=address,
        kv_address="",
        fingerprint="",
        model_id="m",
        max_model_len=100,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        num_blocks=10,
    )


def make_gateway(identity: str, *, reach: Reach | None = None, node: str = "node", port: int = 8000) -> GatewayRecord:
    return GatewayRecord(
        identity=identity,
        node_id=node,
        node_ip="127.0.0.1",
        pid=1,
        host="0.0.0.0",
        port=port,
        reach=reach or Reach(),
        is_serving=True,
    )


def make_request(request_id: str, *, max_tokens: int = 5, generation: int = 0) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(request_id=request_id, prompt_token_ids=[1, 2, 3], sampling=sampling, generation=generation)
