"""The state machine of sequences: for every state and event the code does what the documented table says."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.cluster.contracts import EngineGone, EngineView
from baton.cluster.gateway.serving import sequence as sequence_module
from baton.cluster.gateway.serving.sequence_table import SEQUENCE_TABLE, Effect, SequenceEvent, SequenceState
from baton.engine.core.messages import EngineOutput, ErrorKind, FinishReason

from .sequence_scenes import (
    DECODE,
    EARLY,
    HANDOFF,
    LAST,
    PREFILL,
    SECOND,
    TOKEN,
    UNIFIED,
    E,
    F,
    S,
    Scene,
    check_nothing_is_left,
    decoding,
    done,
    engines,
    failure,
    handing_off,
    output,
    prefilling,
)

PAGE = Path(__file__).parents[3] / "docs/concepts/serving.md"
LIVE = (S.PREFILLING, S.HANDING_OFF, S.DECODING)


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


def test_the_table_has_every_possible_pair() -> None:
    placing = {E.ENGINE_FOUND, E.RECOMPUTE_FOUND, E.READER_FOUND, E.EARLY_READER, E.NO_ENGINE}
    outputs = {E.TOKENS, E.FINISHED, E.LOST, E.REFUSED, E.FAILED}
    assert SEQUENCE_TABLE.keys() == {
        *((S.PLACING, event) for event in placing),
        *((state, event) for state in LIVE for event in outputs),
        *((S.PREFILLING, event) for event in (E.OFFERED_EARLY, E.HANDED_OFF)),
        *((state, E.CLOSED) for state in S),
    }


def test_closing_ends_every_attempt_and_every_offer_in_each_state() -> None:
    for state in S:
        row = SEQUENCE_TABLE[state, E.CLOSED]
        assert row.next_state is S.DONE
        assert {F.CLOSE_ALL, F.WITHDRAW_OFFER} <= set(row.effects)


def test_every_first_output_is_noted_and_every_output_with_tokens_is_delivered() -> None:
    for (state, event), row in SEQUENCE_TABLE.items():
        brings_tokens = event in (E.TOKENS, E.HANDED_OFF, E.FINISHED)
        assert (F.DELIVER in row.effects) is brings_tokens
        assert (F.NOTE_FIRST_OUTPUT in row.effects) is (brings_tokens and state is not S.DECODING)


async def placing(event: SequenceEvent) -> Scene:
    """Return a sequence without an engine. For events of readers, there is an offer of KV."""
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


SCENES: dict[SequenceState, Callable[[SequenceEvent], Awaitable[Scene]]] = {
    S.PLACING: placing,
    S.PREFILLING: prefilling,
    S.HANDING_OFF: handing_off,
    S.DECODING: decoding,
    S.DONE: done,
}


def said(output: EngineOutput | EngineGone, *left: EngineView) -> Callable[[Scene], Awaitable[None]]:
    """Return the event of an engine that sends this output, after which these engines are left."""

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
    """The parts of a scene on which the observed effects depend."""

    offer: bool
    early: bool
    attempt: str  # the kind of the current attempt; "" if there is none
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
            return ["close early"] * there.early  # its offer has been replaced by another
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
    if event is E.EARLY_READER:  # the sequence leaves PLACING at once
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
