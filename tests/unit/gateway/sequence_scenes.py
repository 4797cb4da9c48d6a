"""Scenes for the state machine of the gateway's sequences: one sequence in each state, with scripted engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from baton.cluster.contracts import ClientCounters, DirectorySnapshot, EngineGone, EngineRecord, EngineView, Role
from baton.cluster.gateway.errors import ApiError
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.cluster.gateway.serving.attempt import Deadline
from baton.cluster.gateway.serving.context import ServingContext
from baton.cluster.gateway.serving.sequence import ServedSequence
from baton.cluster.gateway.serving.sequence_table import Effect, SequenceEvent, SequenceState
from baton.cluster.gateway.serving.timeline import Timeline
from baton.cluster.gateway.settings import GatewaySettings
from baton.engine.core.messages import EngineError, EngineOutput, EngineRequest, ErrorKind, FinishReason, KVSource
from baton.engine.core.sampling import SamplingParams

from .engine_views import view

S, E, F = SequenceState, SequenceEvent, Effect
PROMPT = list(range(20, 60))
KV, NEW_KV = KVSource(b"ticket", len(PROMPT)), KVSource(b"another", len(PROMPT))
PREFILL, DECODE = view(0, Role.PREFILL), view(1, Role.DECODE)
UNIFIED, SECOND = view(2), view(3)


class ScriptedStream:
    """The output stream of one attempt; a test puts the outputs in."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.outputs: asyncio.Queue[EngineOutput | EngineGone] = asyncio.Queue()
        self.name, self._log = name, log

    def __aiter__(self) -> AsyncIterator[EngineOutput]:
        return self

    async def __anext__(self) -> EngineOutput:
        output = await self.outputs.get()
        if isinstance(output, EngineGone):
            raise output
        return output

    async def aclose(self) -> None:
        self._log.append(f"close {self.name}")


class ScriptedClient:
    """Engines whose outputs a test scripts. `log` records the calls that they get."""

    def __init__(self, log: list[str]) -> None:
        self.views: list[EngineView] = []
        self.log = log
        self.requests: list[EngineRequest] = []
        self.streams: list[ScriptedStream] = []

    def engines(self) -> list[EngineView]:
        return self.views

    def listed(self) -> DirectorySnapshot:
        return DirectorySnapshot(0, [view.record for view in self.views])

    def counters(self) -> ClientCounters:
        return ClientCounters()

    def last_message_s(self, engine: EngineRecord) -> float:
        return 0.0

    def submit(self, engine: EngineRecord, request: EngineRequest) -> ScriptedStream:
        kind = "early" if request.awaits_first_token else "reader" if request.kv_source else "attempt"
        self.log.append(f"submit {kind}")
        self.requests.append(request)
        self.streams.append(ScriptedStream(kind, self.log))
        return self.streams[-1]

    def begin(self, engine: EngineRecord, request_id: str, generation: int, token_id: int) -> None:
        self.log.append(f"begin {token_id}")

    def abort(self, engine: EngineRecord, request_id: str, generation: int = 0) -> None:
        self.log.append("withdraw")


class Scene:
    """One sequence on scripted engines; a test reads the sequence's outputs one by one."""

    def __init__(self, *views: EngineView, capacity_timeout_s: float = 60.0) -> None:
        self.log: list[str] = []
        self.client = ScriptedClient(self.log)
        self.client.views = list(views)
        settings = GatewaySettings(
            capacity_timeout_s=capacity_timeout_s,
            retry_budget=0.0,
            retry_budget_min=0,
            session_patience_s=0.0,
            local_prefill_max_tokens=0,
        )
        self.metrics = GatewayMetrics("m", self.client.engines)
        serving = ServingContext(self.client, settings, self.metrics)
        vars(serving.breakers).update(
            succeeded=lambda circuits: self.log.append("first output"),
            failed=lambda circuit: self.log.append("circuit"),
        )
        request = EngineRequest(request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=9))
        over = Deadline(at_s=asyncio.get_running_loop().time())
        self.sequence = ServedSequence(serving, request, Timeline(0.0, 0.0), deadline=over)
        self._outputs = self.sequence.outputs()
        self._reader: asyncio.Task[None] | None = None

    async def read(self) -> None:
        """Begin to read the next output, unless a read is pending, and wait until nothing more happens."""
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        for _ in range(20):
            await asyncio.sleep(0)

    async def _read(self) -> None:
        try:
            await anext(self._outputs)
            self.log.append("deliver")
        except ApiError as error:
            self.log.append(f"error {error.status}")

    async def say(self, output: EngineOutput | EngineGone) -> None:
        """Let the engine of the current attempt send an output."""
        stream = [stream for stream in self.client.streams if stream.name != "early"][-1]
        stream.outputs.put_nowait(output)
        await self.read()

    async def close(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._outputs.aclose()

    def num_retries(self) -> float:
        samples = [sample for metric in self.metrics.retries.collect() for sample in metric.samples]
        return sum(sample.value for sample in samples if sample.name.endswith("_total"))


def output(**fields: Any) -> EngineOutput:
    return EngineOutput(request_id="r", **fields)


def failure(kind: ErrorKind) -> EngineOutput:
    return output(finish_reason=FinishReason.ERROR, error=EngineError(kind, f"{kind}!"))


TOKEN = output(token_ids=[7])
LAST = output(token_ids=[8], finish_reason=FinishReason.LENGTH)
HANDOFF = output(token_ids=[7], finish_reason=FinishReason.HANDOFF, kv_source=KV)
EARLY, STALE_EARLY = output(kv_source=KV), output(kv_source=NEW_KV)


async def prefilling(event: SequenceEvent) -> Scene:
    """Return a sequence with an early decode attempt, unless the event is the one that starts this attempt."""
    scene = Scene(PREFILL, DECODE)
    await scene.read()
    if event is not E.OFFERED_EARLY:
        await scene.say(STALE_EARLY)
    return scene


async def handing_off(_: SequenceEvent) -> Scene:
    scene = Scene(PREFILL, DECODE)
    await scene.read()
    await scene.say(HANDOFF)
    return scene


async def decoding(_: SequenceEvent) -> Scene:
    scene = Scene(UNIFIED)
    await scene.read()
    await scene.say(TOKEN)
    return scene


async def done(_: SequenceEvent) -> Scene:
    scene = await decoding(E.FINISHED)
    await scene.say(LAST)
    return scene


def engines(*views: EngineView) -> Callable[[Scene], Awaitable[None]]:
    """Return the event that makes these the only engines."""

    async def happen(scene: Scene) -> None:
        scene.client.views = list(views)
        await scene.read()

    return happen


async def check_nothing_is_left(scene: Scene, *, has_offer: bool) -> None:
    """Close the sequence, and check that each of its attempts is closed once, and its offer withdrawn if it has one."""
    before = len(scene.log)
    await scene.close()
    assert ("withdraw" in scene.log[before:]) is has_offer
    submitted = sorted(entry.removeprefix("submit ") for entry in scene.log if entry.startswith("submit "))
    assert sorted(entry.removeprefix("close ") for entry in scene.log if entry.startswith("close ")) == submitted
    assert scene.sequence.state is S.DONE
