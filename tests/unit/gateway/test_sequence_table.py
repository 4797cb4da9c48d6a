"""Every pair of state and event of a sequence: the code does what its row says, and the page shows the same table."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.contracts import ClientCounters, DirectorySnapshot, EngineGone, EngineRecord, EngineView, Role
from baton.cluster.gateway.errors import ApiError
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.cluster.gateway.routing.breaker import Breakers, CircuitKey
from baton.cluster.gateway.routing.rates import LearntRates
from baton.cluster.gateway.routing.router import Router
from baton.cluster.gateway.serving import sequence as sequence_module
from baton.cluster.gateway.serving.admission import AdmissionControl
from baton.cluster.gateway.serving.attempt import Deadline
from baton.cluster.gateway.serving.context import ServingContext
from baton.cluster.gateway.serving.sequence import ServedSequence
from baton.cluster.gateway.serving.sequence_table import SEQUENCE_TABLE, Effect, SequenceEvent, SequenceState
from baton.cluster.gateway.serving.timeline import Timeline
from baton.cluster.gateway.settings import GatewaySettings
from baton.engine.core.messages import (
    EngineError,
    EngineOutput,
    EngineRequest,
    ErrorKind,
    FinishReason,
    KVSource,
)
from baton.engine.core.sampling import SamplingParams

from .engine_views import view

PAGE = Path(__file__).parents[3] / "docs/concepts/serving.md"
S, E, F = SequenceState, SequenceEvent, Effect
LIVE = (S.PREFILLING, S.HANDING_OFF, S.DECODING)
PROMPT = list(range(20, 60))
KV, NEW_KV = KVSource(b"ticket", len(PROMPT)), KVSource(b"another", len(PROMPT))
PREFILL, DECODE = view(0, Role.PREFILL), view(1, Role.DECODE)
UNIFIED, SECOND = view(2), view(3)

# ---------------------------------------------------------------------- the page


def table() -> str:
    lines = ["| | " + " | ".join(state.name for state in S) + " |", "|---" * (len(S) + 1) + "|"]
    for event in E:
        lines.append(f"| {event.value} | " + " | ".join(cell(state, event) for state in S) + " |")
    return "\n".join(lines)


def cell(state: SequenceState, event: SequenceEvent) -> str:
    row = SEQUENCE_TABLE.get((state, event))
    if row is None:
        return "cannot be"
    effects = "; ".join(effect.value for effect in row.effects)
    return effects if row.next_state is state else f"**{row.next_state.name}** {effects}"


def test_the_page_shows_the_table_of_the_code() -> None:
    assert table() in PAGE.read_text(), f"{PAGE} should show:\n\n{table()}"


# ---------------------------------------------------------------------- the table


def test_the_table_has_every_pair_that_can_be() -> None:
    placing = {E.ENGINE_FOUND, E.RECOMPUTE_FOUND, E.READER_FOUND, E.EARLY_READER, E.NO_ENGINE}
    outputs = {E.TOKENS, E.FINISHED, E.LOST, E.REFUSED, E.FAILED}
    assert SEQUENCE_TABLE.keys() == {
        *((S.PLACING, event) for event in placing),
        *((state, event) for state in LIVE for event in outputs),
        *((S.PREFILLING, event) for event in (E.OFFERED_EARLY, E.HANDED_OFF)),
        *((state, E.CLOSED) for state in S),
    }


def test_whatever_happened_closing_ends_every_attempt_and_every_offer() -> None:
    for state in S:
        row = SEQUENCE_TABLE[state, E.CLOSED]
        assert row.next_state is S.DONE
        assert {F.CLOSE_ALL, F.WITHDRAW_OFFER} <= set(row.effects)


def test_every_first_output_is_noted_and_every_output_with_tokens_is_delivered() -> None:
    for (state, event), row in SEQUENCE_TABLE.items():
        brings_tokens = event in (E.TOKENS, E.HANDED_OFF, E.FINISHED)
        assert (F.DELIVER in row.effects) is brings_tokens
        assert (F.NOTE_FIRST_OUTPUT in row.effects) is (brings_tokens and state is not S.DECODING)


# ---------------------------------------------------------------------- the code


class ScriptedStream:
    """An attempt's outputs, which a test gives."""

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
    """Engines that say what a test makes them say. What they are asked is in `log`."""

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


class LoggingBreakers(Breakers):
    def __init__(self, settings: GatewaySettings, log: list[str]) -> None:
        super().__init__(settings.breaker, time.monotonic)
        self._log = log

    def succeeded(self, peers: Any) -> None:
        self._log.append("first output")

    def failed(self, peer: CircuitKey) -> None:
        self._log.append("circuit")


class Scene:
    """One sequence between scripted engines, whose outputs a test asks for one by one."""

    def __init__(self, *views: EngineView, capacity_timeout_s: float = 60.0) -> None:
        self.log: list[str] = []
        self.client = ScriptedClient(self.log)
        self.client.views = list(views)
        settings = GatewaySettings(capacity_timeout_s=capacity_timeout_s, retry_budget=0.0, retry_budget_min=0)
        rates = LearntRates(settings.cost, time.monotonic)
        router = Router("g", rates=rates, session_patience_s=0.0, local_prefill_max_tokens=0)
        self.metrics = GatewayMetrics("m", self.client.engines)
        admission, breakers = AdmissionControl(settings, rates, time.monotonic), LoggingBreakers(settings, self.log)
        serving = ServingContext(self.client, router, settings, self.metrics, admission, breakers)
        request = EngineRequest(request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=9))
        over = Deadline(at_s=asyncio.get_running_loop().time())
        self.sequence = ServedSequence(serving, request, Timeline(0.0, 0.0), deadline=over)
        self._outputs = self.sequence.outputs()
        self._reader: asyncio.Task[None] | None = None

    async def read(self) -> None:
        """Ask for an output, if none is asked for, and wait until nothing more happens."""
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
        """Let the engine of the attempt that is read say something."""
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


async def placing(event: SequenceEvent) -> Scene:
    """Return a sequence for which no engine is there. For events of readers, KV is on offer."""
    if event is E.NO_ENGINE:
        return Scene(capacity_timeout_s=1e-9)
    if event in (E.ENGINE_FOUND, E.CLOSED):
        scene = Scene()
        await scene.read()
        return scene
    scene = Scene(PREFILL, DECODE)
    await scene.read()
    if event is E.EARLY_READER:
        await scene.say(EARLY)
    else:
        scene.client.views = [PREFILL]
        await scene.say(HANDOFF)
        await scene.read()
    return scene


async def prefilling(event: SequenceEvent) -> Scene:
    """Return a sequence beside which a decode engine fetches early, unless the event is that it begins to."""
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


SCENES: dict[SequenceState, Callable[[SequenceEvent], Awaitable[Scene]]] = {
    S.PLACING: placing,
    S.PREFILLING: prefilling,
    S.HANDING_OFF: handing_off,
    S.DECODING: decoding,
    S.DONE: done,
}


def engines(*views: EngineView) -> Callable[[Scene], Awaitable[None]]:
    """These engines are there now, and no others."""

    async def happen(scene: Scene) -> None:
        scene.client.views = list(views)
        await scene.read()

    return happen


def said(output: EngineOutput | EngineGone, *left: EngineView) -> Callable[[Scene], Awaitable[None]]:
    """The engine says this, and these engines are left."""

    async def happen(scene: Scene) -> None:
        if scene.sequence.state is not S.PLACING and output is not EARLY:
            scene.client.views = list(left)
        await scene.say(output)

    return happen


GIVEN_UP = output(finish_reason=FinishReason.ABORT)
EVENTS: dict[SequenceEvent, list[Callable[[Scene], Awaitable[None]]]] = {
    E.ENGINE_FOUND: [engines(UNIFIED), engines(PREFILL, DECODE)],
    E.RECOMPUTE_FOUND: [engines(UNIFIED)],
    E.READER_FOUND: [engines(DECODE), engines(UNIFIED, DECODE)],
    E.EARLY_READER: [said(HANDOFF)],
    E.NO_ENGINE: [engines()],
    E.OFFERED_EARLY: [said(EARLY)],
    E.TOKENS: [said(TOKEN)],
    E.HANDED_OFF: [said(HANDOFF, PREFILL)],
    E.FINISHED: [said(LAST)],
    E.LOST: [said(failure(ErrorKind.ENGINE_DEAD)), said(GIVEN_UP), said(EngineGone("died"))],
    E.REFUSED: [said(failure(ErrorKind.OVERLOADED), SECOND)],
    E.FAILED: [said(failure(ErrorKind.INVALID))],
    E.CLOSED: [lambda scene: scene.close()],
}


@dataclass(frozen=True)
class Present:
    """The things that effects may find in a scene."""

    offer: bool
    early: bool
    attempt: str  # the kind of the attempt that is read; "" if there is none
    has_output: bool


def present(state: SequenceState, event: SequenceEvent) -> Present:
    with_offer = (E.RECOMPUTE_FOUND, E.READER_FOUND)
    return Present(
        offer=state is S.HANDING_OFF or (state is S.PLACING and event in with_offer),
        early=state is S.PREFILLING and event is not E.OFFERED_EARLY,
        attempt={S.PLACING: "", S.HANDING_OFF: "reader"}.get(state, "attempt"),
        has_output=state in (S.DECODING, S.DONE),
    )


def observed(effect: Effect, event: SequenceEvent, there: Present) -> list[str]:
    """Return what the engines, the circuits and the client see of an effect."""
    match effect:
        case F.SUBMIT | F.SUBMIT_SOON | F.SUBMIT_EARLY:
            return ["submit " + {F.SUBMIT: "attempt", F.SUBMIT_SOON: "reader", F.SUBMIT_EARLY: "early"}[effect]]
        case F.BEGIN_EARLY:
            return ["begin 7"]
        case F.NOTE_FIRST_OUTPUT:
            return ["first output"]
        case F.WITHDRAW_OFFER:
            return ["withdraw"] if there.offer else []
        case F.CLOSE_ATTEMPT:
            return ["close attempt"]
        case F.CLOSE_ALL:
            return ["close early"] * there.early + [f"close {there.attempt}"] * bool(there.attempt)
        case F.HAND_OFF:
            return ["close early"] * there.early  # what it fetches is not what is on offer now
        case F.BLAME:
            return ["circuit"] * (event is E.LOST)
        case F.JUDGE_DEADLINE:
            return ["circuit"] * (bool(there.attempt) and not there.has_output)
        case F.ANSWER_ERROR:
            return ["error 400"]
        case F.ANSWER_NO_ENGINE:
            return ["error 503"]
    return []


def expected(state: SequenceState, event: SequenceEvent) -> list[str]:
    there = present(state, event)
    effects = list(SEQUENCE_TABLE[state, event].effects)
    if event is E.EARLY_READER:  # PLACING is passed at once
        effects = [*SEQUENCE_TABLE[S.PREFILLING, E.HANDED_OFF].effects, *effects]
    entries = [entry for effect in effects for entry in observed(effect, event, there)]
    return entries + ["deliver"] * (F.DELIVER in effects)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_module, "POLL_S", 0.0)


CELLS = [(state, event, number) for state, event in SEQUENCE_TABLE for number in range(len(EVENTS[event]))]


@pytest.mark.parametrize(
    ("state", "event", "number"), CELLS, ids=[f"{state.name}-{event.name}-{number}" for state, event, number in CELLS]
)
async def test_a_sequence_does_what_its_row_says(
    state: SequenceState, event: SequenceEvent, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, sequence_module.__name__)
    row, scene = SEQUENCE_TABLE[state, event], await SCENES[state](event)
    assert scene.sequence.state is (S.PREFILLING if event is E.EARLY_READER else state)
    before, retries, requests = len(scene.log), scene.num_retries(), len(scene.client.requests)
    caplog.clear()
    await EVENTS[event][number](scene)
    assert scene.log[before:] == expected(state, event)
    assert scene.sequence.state is row.next_state
    assert scene.num_retries() - retries == (F.RETRY in row.effects)
    assert sum("attempt 1 at r" in record.message for record in caplog.records) == (F.BLAME in row.effects)
    if F.NEW_GENERATION in row.effects:
        assert [request.generation for request in scene.client.requests[requests:]] == [1]
    await check_nothing_is_left(scene, has_offer=keeps_offer(state, event))


def keeps_offer(state: SequenceState, event: SequenceEvent) -> bool:
    if event in (E.HANDED_OFF, E.EARLY_READER):
        return True
    dropped = {F.DROP_OFFER, F.WITHDRAW_OFFER} & set(SEQUENCE_TABLE[state, event].effects)
    return present(state, event).offer and not dropped


async def check_nothing_is_left(scene: Scene, *, has_offer: bool) -> None:
    """Close the sequence: what it had is ended, and only that."""
    before = len(scene.log)
    await scene.close()
    assert ("withdraw" in scene.log[before:]) is has_offer
    submitted = sorted(entry.removeprefix("submit ") for entry in scene.log if entry.startswith("submit "))
    assert sorted(entry.removeprefix("close ") for entry in scene.log if entry.startswith("close ")) == submitted
    assert scene.sequence.state is S.DONE


async def test_an_engine_that_answers_out_of_turn_fails_the_request_and_not_the_gateway() -> None:
    for scene, unexpected in ((await decoding(E.TOKENS), HANDOFF), (await handing_off(E.TOKENS), EARLY)):
        await scene.say(unexpected)
        assert "error 500" in scene.log
        await check_nothing_is_left(scene, has_offer=False)


async def test_a_reader_is_told_although_the_client_does_not_ask_for_more() -> None:
    scene = Scene(PREFILL, DECODE)
    await scene.read()
    await scene.say(HANDOFF)
    assert scene.log[-2:] == ["deliver", "submit reader"]
    assert scene.client.requests[-1].output_token_ids == [7]
    await scene.close()


async def test_where_no_reader_is_there_another_engine_is_told_before_the_first_token_is_sent() -> None:
    scene = Scene(PREFILL, DECODE)
    await scene.read()
    scene.client.views = [UNIFIED]
    await scene.say(HANDOFF)
    assert scene.log[-3:] == ["withdraw", "submit attempt", "deliver"]
    assert scene.sequence.path == "recomputed; reason=no-decode-engine; rung=unified"
    await scene.close()


async def test_an_early_reader_goes_on_only_with_the_kv_that_it_fetches() -> None:
    scene = await prefilling(E.HANDED_OFF)
    scene.client.views = [PREFILL, DECODE]
    await scene.say(HANDOFF)
    assert scene.log[-4:] == ["close attempt", "close early", "deliver", "submit reader"]
    early, reader = scene.client.requests[-2:]
    assert (early.kv_source, reader.kv_source) == (NEW_KV, KV)
    assert reader.generation == early.generation + 1, "an output of the early reader may still come"
    await scene.close()


async def test_a_refusal_leaves_the_offer_to_another_reader() -> None:
    scene = await handing_off(E.REFUSED)
    await scene.say(failure(ErrorKind.OVERLOADED))
    assert "withdraw" not in scene.log
    assert scene.sequence.state is S.PLACING
    await check_nothing_is_left(scene, has_offer=True)
