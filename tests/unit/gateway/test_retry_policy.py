"""The consequences of a failed attempt: every row of the retry policy, through a gateway and real engine cores."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.serving.retry_policy import (
    FAILURE_OF,
    RETRY_POLICY,
    AttemptHistory,
    Failure,
    RetryCharge,
    Rung,
)
from baton.engine.core.messages import EngineError, EngineRequest, ErrorKind
from baton.kv_transfer.protocol.messages import EngineKey

from ...helpers.fake_cluster import FakeEngine
from ...helpers.gateway_service import Service, events

PAGE = Path(__file__).parents[3] / "docs/operate/reliability.md"
PROMPT = list(range(20, 60))
FIELDS: dict[str, Any] = {"seed": 11, "max_tokens": 12, "ignore_eos": True}
P, D, U = Role.PREFILL, Role.DECODE, Role.UNIFIED


@dataclass(frozen=True)
class Scene:
    """Engines whose submissions fail: `fails` are the failures in order; with the last one, engines `joins` start."""

    roles: list[Role]
    fails: list[tuple[Role, ErrorKind]] = field(default_factory=list)
    joins: list[Role] = field(default_factory=list)
    local_tokens: int = 8192
    loses_reader: bool = False  # the decode engine dies during prefill; `joins` start then, with another KV layout
    loses_prefill: bool = False  # the prefill engine dies with the last failure


def _down(kind: ErrorKind) -> dict[Rung | None, Scene]:
    """Return scenes of a failure in the engine that computes the prompt."""
    return {
        Rung.OTHER_PREFILL: Scene([P, P, D], [(P, kind)]),
        Rung.RECOMPUTE: Scene([P, D], [(P, kind)]),
        Rung.UNIFIED: Scene([U, U], [(U, kind)]),
        Rung.AGAIN: Scene([U], [(U, kind)]),
    }


SCENES: dict[Failure, dict[Rung | None, Scene]] = {
    Failure.ENGINE_GONE: _down(ErrorKind.ENGINE_DEAD),
    Failure.ENGINE_FAILED: _down(ErrorKind.INTERNAL),
    Failure.ENGINE_LEAVING: {
        **_down(ErrorKind.LEAVING),
        Rung.AGAIN: Scene([U, U], [(U, ErrorKind.ENGINE_DEAD), (U, ErrorKind.LEAVING)]),
    },
    Failure.KV_LOST: {
        Rung.OTHER_PREFILL: Scene([P, P, D], [(D, ErrorKind.KV_LOST)]),
        Rung.RECOMPUTE: Scene([P, D], [(D, ErrorKind.KV_LOST)]),
        Rung.UNIFIED: Scene([P, D], [(D, ErrorKind.KV_LOST)], joins=[U], local_tokens=0),
        Rung.AGAIN: Scene([P, D], [(D, ErrorKind.KV_LOST)], local_tokens=0),
    },
    Failure.KV_EXPIRED: {
        Rung.OTHER_PREFILL: Scene([P, D], [(D, ErrorKind.KV_EXPIRED)]),
        Rung.RECOMPUTE: Scene([P, D], [(D, ErrorKind.KV_EXPIRED)], loses_prefill=True),
        Rung.UNIFIED: Scene([P, D], [(D, ErrorKind.KV_EXPIRED)], joins=[U], local_tokens=0, loses_prefill=True),
        Rung.AGAIN: Scene([P, D], [(P, ErrorKind.INTERNAL), (D, ErrorKind.KV_EXPIRED)], local_tokens=0),
    },
    Failure.NO_READER: {
        Rung.OTHER_DECODE: Scene([P, D]),
        Rung.RECOMPUTE: Scene([P, D], joins=[D], loses_reader=True),
        Rung.UNIFIED: Scene([P, D], joins=[U], loses_reader=True),
    },
    Failure.OVERLOADED: {
        Rung.OTHER_DECODE: Scene([P, D, D], [(D, ErrorKind.OVERLOADED)]),
        Rung.OTHER_PREFILL: Scene([P, P, D], [(P, ErrorKind.OVERLOADED)]),
        Rung.RECOMPUTE: Scene([P, D], [(P, ErrorKind.OVERLOADED)]),
        Rung.UNIFIED: Scene([U, U], [(U, ErrorKind.OVERLOADED)]),
    },
    Failure.TIMED_OUT: {None: Scene([U, U], [(U, ErrorKind.TIMED_OUT)])},
    Failure.INVALID: {None: Scene([U, U], [(U, ErrorKind.INVALID)])},
    Failure.TOO_LONG: {None: Scene([U, U], [(U, ErrorKind.TOO_LONG)])},
}
STATUS = {Failure.TIMED_OUT: 408, Failure.INVALID: 400, Failure.TOO_LONG: 413}
ROWS = [(failure, rung) for failure, rule in RETRY_POLICY.items() for rung in rule.rungs or (None,)]


def stage(service: Service, scene: Scene) -> None:
    cluster, coming = service.cluster, list(scene.fails)

    def fault(engine: FakeEngine, request: EngineRequest) -> EngineError | None:
        if scene.loses_reader and engine.record.role is P:
            cluster.members[1].die()
            for role in scene.joins:
                cluster.start(role, fingerprint="another")
        if not coming or engine.record.role is not coming[0][0]:
            return None
        _, kind = coming.pop(0)
        if scene.loses_prefill and not coming:
            cluster.members[0].die()
        for role in () if coming else scene.joins:
            cluster.start(role)
        return EngineError(kind, f"{kind}!")

    cluster.fault = fault


@pytest.fixture
async def expected(start: Callable[..., Service]) -> str:
    response = await start(Role.UNIFIED).complete(PROMPT, **FIELDS)
    return response.json()["choices"][0]["text"]


def test_every_failure_of_an_engine_has_a_row() -> None:
    assert set(FAILURE_OF) == set(ErrorKind)
    assert set(RETRY_POLICY) == set(Failure)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("failure", "rung"), ROWS, ids=[f"{failure}-{rung}" for failure, rung in ROWS])
async def test_each_failure_can_lead_to_each_of_its_rungs(
    start: Callable[..., Service], expected: str, failure: Failure, rung: Rung | None
) -> None:
    scene = SCENES[failure][rung]
    service = start(*scene.roles, local_prefill_max_tokens=scene.local_tokens)
    stage(service, scene)
    response = await service.complete(PROMPT, **FIELDS)
    samples = await service.metrics()
    await service.cluster.settled()
    if rung is None:
        assert response.status_code == STATUS[failure]
        assert sum(len(engine.submitted) for engine in service.cluster.members) == 1
        assert not any(name.startswith("baton_request_retries_total{") for name in samples)
        return
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == expected
    way = response.headers["x-baton-path"]
    if (failure, rung) == (Failure.NO_READER, Rung.OTHER_DECODE):
        assert way == "disaggregated; reason=least-loaded"  # the reason of every hand-off
        return
    path = "disaggregated" if rung is Rung.OTHER_DECODE else "recomputed"
    assert way == f"{path}; reason={failure}; rung={rung}"
    assert samples[f'baton_request_rungs_total{{reason="{failure}",rung="{rung}"}}'] == 1
    if failure is not Failure.NO_READER:
        assert samples[f'baton_request_retries_total{{reason="{failure}"}}'] == 1


async def test_a_busy_decode_engine_does_not_recompute_if_there_is_a_unified_engine(
    start: Callable[..., Service], expected: str
) -> None:
    service = start(P)
    decode = service.cluster.start(D, max_num_seqs=1)
    decode.step_s = 0.005
    busy = [asyncio.create_task(service.complete([i] * 20, max_tokens=60, ignore_eos=True)) for i in (5, 6, 7)]
    async with asyncio.timeout(20):
        while decode.stats.num_requests_waiting == 0:
            await asyncio.sleep(0.001)
    stage(service, Scene([], [(P, ErrorKind.ENGINE_DEAD)], joins=[U]))
    response = await service.complete(PROMPT, **FIELDS)
    assert response.headers["x-baton-path"] == "recomputed; reason=engine-gone; rung=unified"
    assert response.json()["choices"][0]["text"] == expected
    assert {(await answer).status_code for answer in busy} == {200}


@pytest.mark.parametrize(
    "kind", [kind for kind, its in FAILURE_OF.items() if RETRY_POLICY[its].rungs and RETRY_POLICY[its].counts]
)
def test_a_request_fails_at_most_so_often(kind: ErrorKind) -> None:
    attempts, most = AttemptHistory(max_attempts=4), RETRY_POLICY[FAILURE_OF[kind]].max_failures or 4
    for number in range(1, most + 1):
        attempts.failed(EngineError(kind, ""), (f"e{number}", 1))
        assert attempts.may_go_on is (number < most)


def test_engines_that_leave_cost_no_attempt_and_no_budget() -> None:
    attempts = AttemptHistory(max_attempts=2)
    for number in range(9):
        attempts.failed(EngineError(ErrorKind.LEAVING, ""), (f"e{number}", 1))
        assert attempts.may_go_on
        assert not attempts.must_pay
    attempts.failed(EngineError(ErrorKind.ENGINE_DEAD, ""), EngineKey("dead", 1))
    assert not attempts.must_pay, "the first loss must be free"


def test_the_first_loss_is_free_and_so_are_losses_of_attempts_that_brought_tokens() -> None:
    dead = EngineError(ErrorKind.ENGINE_DEAD, "")
    attempts = AttemptHistory(max_attempts=9)
    paid = []
    for brought in (False, False, True, False):
        attempts.failed(dead, ("e", 1), brought_tokens=brought)
        paid.append(attempts.must_pay)
    assert paid == [False, True, False, True]


def test_the_documentation_has_the_retry_policys_table() -> None:
    rows = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().partition("## The retry policy")[2].partition("\n## ")[0].splitlines()
        if re.match(r"\| `", line) and line.count("|") == 8
    ]
    assert [row[:1] + row[2:] for row in rows] == [
        [
            str(failure),
            ", ".join(rule.rungs) or "error",
            str(rule.blame),
            str(rule.pays),
            ("yes" if rule.counts else "no") if rule.max_failures is None else f"yes, {rule.max_failures} at most",
            "yes" if rule.opens_circuit else "no",
        ]
        for failure, rule in RETRY_POLICY.items()
    ]
    assert set(RetryCharge) == {rule.pays for rule in RETRY_POLICY.values()}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("deaths", [1, 2])
async def test_all_streams_of_an_engine_that_is_killed_go_on(start: Callable[..., Service], deaths: int) -> None:
    """There are more streams than the retry budget holds: the death of an engine does not use it up."""
    fields = {**FIELDS, "max_tokens": 60}
    whole = (await start(U).complete(PROMPT, **fields)).json()["choices"][0]["text"]
    service = start(retry_budget=0.0, retry_budget_min=0)
    engines = [service.cluster.start(U, num_blocks=512) for _ in range(3)]
    for engine in engines:
        engine.step_s = 0.01
    answers = [asyncio.create_task(service.complete(PROMPT, **fields, stream=True)) for _ in range(32)]
    for _ in range(deaths):
        alive = [engine for engine in engines if engine.alive]
        async with asyncio.timeout(20):
            while sum(engine.stats.num_requests_running for engine in alive) < len(answers):
                await asyncio.sleep(0.002)
            victim = max(alive, key=lambda engine: len(engine.streams))
            enough = victim.stats.generation_tokens + 3 * len(victim.streams)
            while victim.stats.generation_tokens < enough:
                await asyncio.sleep(0.002)
        victim.die()
    for answer in answers:
        *chunks, done = events((await answer).text)
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
