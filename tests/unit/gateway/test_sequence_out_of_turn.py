"""Engines that answer out of turn, and decode attempts that begin early or are replaced."""

from __future__ import annotations

import pytest

from baton.cluster.gateway.serving import sequence as sequence_module
from baton.engine.core.messages import ErrorKind

from .sequence_scenes import (
    DECODE,
    EARLY,
    HANDOFF,
    KV,
    NEW_KV,
    PREFILL,
    UNIFIED,
    E,
    S,
    Scene,
    check_nothing_is_left,
    decoding,
    failure,
    handing_off,
    prefilling,
)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_module, "POLL_S", 0.0)


async def test_an_engine_that_answers_out_of_turn_fails_the_request_and_not_the_gateway() -> None:
    for scene, unexpected in ((await decoding(E.TOKENS), HANDOFF), (await handing_off(E.TOKENS), EARLY)):
        await scene.say(unexpected)
        assert "error 500" in scene.log
        await check_nothing_is_left(scene, has_offer=False)


async def test_a_decode_engine_is_chosen_even_if_the_client_does_not_read_on() -> None:
    scene = Scene(PREFILL, DECODE)
    await scene.read()
    await scene.say(HANDOFF)
    assert scene.log[-2:] == ["deliver", "submit reader"]
    assert scene.client.requests[-1].output_token_ids == [7]
    await scene.close()


async def test_without_a_reader_another_engine_is_chosen_before_the_first_token_is_sent() -> None:
    scene = Scene(PREFILL, DECODE)
    await scene.read()
    scene.client.views = [UNIFIED]
    await scene.say(HANDOFF)
    assert scene.log[-3:] == ["withdraw", "submit attempt", "deliver"]
    assert scene.sequence.path == "recomputed; reason=no-decode-engine; rung=unified"
    await scene.close()


async def test_an_early_attempt_continues_only_with_the_kv_that_it_reads() -> None:
    scene = await prefilling(E.HANDED_OFF)
    scene.client.views = [PREFILL, DECODE]
    await scene.say(HANDOFF)
    assert scene.log[-4:] == ["close attempt", "close early", "deliver", "submit reader"]
    early, reader = scene.client.requests[-2:]
    assert (early.kv_source, reader.kv_source) == (NEW_KV, KV)
    assert reader.generation == early.generation + 1, "a late output of the early attempt must have another generation"
    await scene.close()


async def test_a_refusal_leaves_the_offer_to_another_reader() -> None:
    scene = await handing_off(E.REFUSED)
    await scene.say(failure(ErrorKind.OVERLOADED))
    assert "withdraw" not in scene.log
    assert scene.sequence.state is S.PLACING
    await check_nothing_is_left(scene, has_offer=True)
