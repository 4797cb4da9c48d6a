"""The timeline of an answer: time stamps of the gateway and of engines, whose parts add up to the latency."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from baton.cluster.contracts import EngineRecord, Role
from baton.cluster.gateway.routing.load import Placement
from baton.cluster.gateway.serving.attempt import Attempt
from baton.cluster.gateway.serving.timeline import Stamp, Timeline
from baton.engine.core.stages import Stage

from ...helpers.fake_cluster import FakeEngine
from ...helpers.gateway_service import Service, events, until
from .zmq_fleet import WiredFleet

PROMPT = list(range(20, 60)) * 4
FIELDS: dict[str, Any] = {"seed": 11, "max_tokens": 8, "ignore_eos": True, "baton_timeline": True}
CHUNK = 32
WAIT_S = 0.05

ARRIVAL = ["ingress", "admitted", "routed"]
PREFILL = ["prefill_queued", "prefill_started"]
HANDOFF = ["ticket", "decode_routed", "decode_queued", "claimed", "pulled", "committed", "first_decode"]
ONE_ENGINE = [*ARRIVAL, *PREFILL, "first_token", "last_token"]
TWO_ENGINES = [*ARRIVAL, *PREFILL, "first_token", *HANDOFF, "last_token"]


def parts_of(timeline: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of each stamp, summed over its occurrences."""
    parts: dict[str, float] = {}
    for part in timeline["parts"]:
        parts[part["stamp"]] = parts.get(part["stamp"], 0.0) + part["part_s"]
    return parts


def stamps_of(timeline: dict[str, Any]) -> list[str]:
    return [part["stamp"] for part in timeline["parts"]]


async def check_sums(service: Service, timelines: list[dict[str, Any]]) -> None:
    """Check that parts add up. `timelines` must be those of all answers of this gateway."""
    for timeline in timelines:
        assert all(part["part_s"] >= 0 for part in timeline["parts"])
        assert math.fsum(part["part_s"] for part in timeline["parts"]) == pytest.approx(timeline["latency_s"], abs=1e-9)
        assert timeline["parts"][-1]["at_s"] == pytest.approx(timeline["latency_s"], abs=1e-9)
    samples = await service.metrics()
    observed = [value for name, value in samples.items() if name.startswith("baton_request_part_seconds_sum")]
    measured = samples['baton_e2e_request_latency_seconds_sum{model_name="tiny"}']
    assert math.fsum(observed) == pytest.approx(measured, abs=1e-6)
    last_byte = samples['baton_request_part_seconds_sum{model_name="tiny",part="last_byte"}']
    told = math.fsum(timeline["latency_s"] for timeline in timelines)
    assert told + last_byte == pytest.approx(measured, abs=1e-6)


async def streamed(service: Service, **fields: Any) -> list[dict[str, Any]]:
    """Return the timelines of a stream, after checking that only its end has them."""
    response = await service.complete(PROMPT, **FIELDS, stream=True, **fields)
    *chunks, last, done = events(response.text)
    assert done == "[DONE]"
    assert not [chunk for chunk in chunks if "baton_timeline" in chunk]
    assert last["choices"] == []
    return last["baton_timeline"]


async def whole(service: Service) -> list[dict[str, Any]]:
    return (await service.complete(PROMPT, **FIELDS)).json()["baton_timeline"]


async def of_chat(service: Service) -> list[dict[str, Any]]:
    return (await service.chat("hello", **FIELDS)).json()["baton_timeline"]


async def of_response(service: Service) -> list[dict[str, Any]]:
    body = {"model": "tiny", "input": "hello", "max_output_tokens": 8, "baton_timeline": True}
    return (await service.http.post("/v1/responses", json=body)).json()["baton_timeline"]


def kill_once(service: Service, after_tokens: int, *roles: Role) -> None:
    """Let the first engine of these roles that has generated so many tokens die, and no other."""
    members = [engine for engine in service.cluster.members if engine.record.role in roles]

    def spare_the_others() -> None:
        for engine in members:
            engine.die_after_tokens = None

    for engine in members:
        engine.die_after_tokens, engine.on_death = after_tokens, spare_the_others


@pytest.mark.parametrize("ask", [whole, streamed, of_chat, of_response])
@pytest.mark.parametrize(
    ("roles", "stamps"), [([Role.UNIFIED], ONE_ENGINE), ([Role.PREFILL, Role.DECODE], TWO_ENGINES)]
)
async def test_the_parts_of_an_answer_add_up_to_its_latency(
    start: Callable[..., Service],
    ask: Callable[[Service], Awaitable[list[dict[str, Any]]]],
    roles: list[Role],
    stamps: list[str],
) -> None:
    service = start(*roles)
    (timeline,) = await ask(service)
    assert stamps_of(timeline) == stamps
    await check_sums(service, [timeline])
    engines = [part["engine"] for part in timeline["parts"] if "engine" in part]
    assert list(dict.fromkeys(engines)) == [engine.record.engine_id for engine in service.cluster.members]


async def test_the_timeline_shows_the_cost_of_a_failed_attempt(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, Role.UNIFIED)
    kill_once(service, 3, Role.UNIFIED)
    (timeline,) = await whole(service)
    again = ["failed", "routed", *PREFILL, "resumed"]
    assert stamps_of(timeline) == [*ARRIVAL, *PREFILL, "first_token", *again, "last_token"]
    await check_sums(service, [timeline])
    (dead,) = (engine for engine in service.cluster.members if not engine.alive)
    (failed,) = (part for part in timeline["parts"] if part["stamp"] == "failed")
    assert failed["engine"] == dead.record.engine_id


async def test_an_answer_whose_decode_engine_dies_is_handed_over_twice(start: Callable[..., Service]) -> None:
    service = start(Role.PREFILL, Role.DECODE, Role.DECODE)
    kill_once(service, 3, Role.DECODE)
    (timeline,) = await whole(service)
    again = ["failed", "routed", *PREFILL, "resumed", *HANDOFF]
    assert stamps_of(timeline) == [*TWO_ENGINES[:-1], *again, "last_token"]
    await check_sums(service, [timeline])


async def test_blocks_that_were_lost_count_as_a_failed_attempt(start: Callable[..., Service]) -> None:
    service = start(Role.PREFILL, Role.DECODE)
    service.cluster.wire.lose = 1
    (timeline,) = await whole(service)
    stamps = stamps_of(timeline)
    lost = stamps.index("failed")
    assert stamps[:lost] == [*ARRIVAL, *PREFILL, "first_token", "ticket", "decode_routed", "decode_queued"]
    assert stamps[lost : lost + 2] == ["failed", "routed"]
    assert "resumed" in stamps[lost:]
    await check_sums(service, [timeline])


async def test_transfers_during_prefill_add_nothing_to_the_latency(
    start: Callable[..., Service],
) -> None:
    service = start()
    service.cluster.wire.progressive = True
    for role in (Role.PREFILL, Role.DECODE):
        service.cluster.start(role, max_num_batched_tokens=CHUNK).step_s = 0.005
    (timeline,) = await whole(service)
    assert stamps_of(timeline) == TWO_ENGINES
    at_s = {part["stamp"]: part["at_s"] for part in timeline["parts"]}
    hidden = ["ticket", "decode_routed", "decode_queued", "claimed"]
    assert all(at_s[stamp] < at_s["first_token"] for stamp in hidden)
    assert [parts_of(timeline)[stamp] for stamp in hidden] == [0.0] * len(hidden)
    await check_sums(service, [timeline])


async def pause(engine: FakeEngine) -> None:
    """Pause an engine until `WAIT_S` after it got a request."""
    engine.running.clear()
    await until(lambda: engine.submitted)
    await asyncio.sleep(WAIT_S)
    engine.running.set()


async def hold_blocks(service: Service) -> None:
    service.cluster.wire.hold = True
    decode = service.cluster.members[1]
    await until(lambda: decode.stats.num_requests_waiting_for_kv)
    await asyncio.sleep(WAIT_S)
    service.cluster.wire.hold = False


async def test_each_wait_is_in_its_own_part(start: Callable[..., Service]) -> None:
    waits: dict[str, Callable[[Service], Awaitable[None]]] = {
        "prefill_started": lambda service: pause(service.cluster.members[0]),
        "claimed": lambda service: pause(service.cluster.members[1]),
        "pulled": hold_blocks,
    }
    for stamp, wait in waits.items():
        service = start(Role.PREFILL, Role.DECODE)
        (timeline,), _ = await asyncio.gather(whole(service), wait(service))
        assert parts_of(timeline)[stamp] >= WAIT_S
        await check_sums(service, [timeline])


async def test_an_engine_may_get_a_request_before_its_gateway_notes_that_it_was_sent(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start(Role.UNIFIED)
    submit = service.cluster.submit

    def submit_slowly(*arguments: Any) -> Any:
        stream = submit(*arguments)
        time.sleep(WAIT_S)
        return stream

    monkeypatch.setattr(service.cluster, "submit", submit_slowly)
    (timeline,) = await whole(service)
    assert parts_of(timeline)["prefill_started"] >= WAIT_S


async def test_waiting_for_an_engine_is_in_the_part_routed(start: Callable[..., Service]) -> None:
    service = start()
    answer = asyncio.create_task(whole(service))
    await asyncio.sleep(WAIT_S)
    service.cluster.start(Role.UNIFIED)
    (timeline,) = await answer
    assert parts_of(timeline)["routed"] + parts_of(timeline)["admitted"] >= WAIT_S
    await check_sums(service, [timeline])


async def test_a_request_during_a_long_step_waits_in_the_part_of_the_engine() -> None:
    fleet = WiredFleet(Role.UNIFIED)
    (engine,) = fleet.engines
    body = {"model": "tiny", "prompt": PROMPT, **FIELDS}
    try:
        async with fleet.gateway("gateway") as gateway:
            await engine.hang()
            answer = asyncio.create_task(gateway.http.post("/v1/completions", json=body))
            await until(lambda: engine.num_unheard)
            await asyncio.sleep(WAIT_S)
            engine.moves.set()
            (timeline,) = (await answer).json()["baton_timeline"]
    finally:
        fleet.close()
    assert stamps_of(timeline) == ONE_ENGINE
    assert parts_of(timeline)["prefill_started"] >= WAIT_S


async def test_each_choice_has_a_timeline(service: Service) -> None:
    response = await service.complete(PROMPT, **FIELDS, n=3)
    timelines = response.json()["baton_timeline"]
    assert len(timelines) == 3
    assert all(stamps_of(timeline)[-1] == "last_token" for timeline in timelines)
    counts = {name: value for name, value in (await service.metrics()).items() if "part_seconds_count" in name}
    assert counts['baton_request_part_seconds_count{model_name="tiny",part="last_byte"}'] == 3


async def test_a_prompt_that_is_only_scored_has_a_timeline(service: Service) -> None:
    asked = {**FIELDS, "max_tokens": 0, "echo": True, "logprobs": 1}
    (timeline,) = (await service.complete(PROMPT, **asked)).json()["baton_timeline"]
    assert stamps_of(timeline) == ONE_ENGINE
    await check_sums(service, [timeline])


async def test_usage_comes_in_the_same_chunk(service: Service) -> None:
    response = await service.complete(PROMPT, **FIELDS, stream=True, stream_options={"include_usage": True})
    *_, last, _ = events(response.text)
    assert (last["usage"]["completion_tokens"], len(last["baton_timeline"])) == (8, 1)


async def test_without_the_field_answers_have_no_timeline_and_are_still_measured(service: Service) -> None:
    quiet = {**FIELDS, "baton_timeline": False}
    responses = [await service.complete(PROMPT, **quiet), await service.complete(PROMPT, **quiet, stream=True)]
    assert not [response for response in responses if "timeline" in response.text]
    samples = await service.metrics()
    assert samples['baton_request_part_seconds_count{model_name="tiny",part="first_token"}'] == 2
    assert samples['baton_request_queue_time_seconds_count{model_name="tiny"}'] == 2


async def test_failed_answers_are_not_in_the_metrics_of_parts(start: Callable[..., Service]) -> None:
    service = start(capacity_timeout_s=0.01)
    response: httpx.Response = await service.complete(PROMPT, **FIELDS)
    assert response.status_code == 503
    samples = await service.metrics()
    assert samples['baton_request_part_seconds_count{model_name="tiny",part="admitted"}'] == 0


@pytest.fixture
async def attempt(start: Callable[..., Service]) -> Attempt:
    record: EngineRecord = start(Role.UNIFIED).cluster.members[0].record
    return Attempt(Placement(record, 0), stream=None, sent_s=10.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("age_s", [-5.0, math.inf, -math.inf, math.nan, 1e300])
async def test_impossible_ages_are_clamped_to_the_time_between_message_and_answer(
    attempt: Attempt, age_s: float
) -> None:
    timeline = Timeline(9.0, 9.5)
    timeline.sent(attempt)
    timeline.note_stages(attempt, {Stage.QUEUED: age_s, Stage.STARTED: 0.5}, now_s=12.0)
    timeline.note(Stamp.FIRST_TOKEN, 12.0)
    timeline.note(Stamp.LAST_TOKEN, 13.0)
    told = timeline.report()
    assert told.latency_s == 4.0
    queued = next(part for part in told.parts if part.stamp is Stamp.PREFILL_QUEUED)
    assert 1.0 <= queued.at_s <= 3.0


async def test_stages_of_an_engine_are_placed_by_their_age_and_not_by_its_clock(attempt: Attempt) -> None:
    timeline = Timeline(9.0, 9.5)
    timeline.sent(attempt)
    timeline.note_stages(attempt, {Stage.QUEUED: 1.75, Stage.STARTED: 0.5}, now_s=12.0)
    timeline.note(Stamp.FIRST_TOKEN, 12.0)
    parts = {part.stamp: part.part_s for part in timeline.parts()}
    assert parts[Stamp.PREFILL_QUEUED] == 0.25, "of 2 s between message and answer, the engine accounts for 1.75"
    assert (parts[Stamp.PREFILL_STARTED], parts[Stamp.FIRST_TOKEN]) == (1.25, 0.5)


async def test_after_the_last_token_only_the_last_byte_is_noted() -> None:
    now_s = time.monotonic()
    timeline = Timeline(now_s, now_s)
    timeline.note(Stamp.LAST_TOKEN, now_s + 1)
    timeline.note(Stamp.DECODE_ROUTED, now_s + 2)
    timeline.note(Stamp.LAST_BYTE, now_s + 3)
    assert [part.stamp for part in timeline.parts()][2:] == [Stamp.LAST_TOKEN, Stamp.LAST_BYTE]
