"""`prediction` of chat completions: the text that a client expects, from which engines take draft tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.engine.core.messages import EngineRequest
from baton.engine.core.speculation.config import SpeculativeConfig, make_drafter
from baton.engine.core.speculation.drafter import Drafter

from ...helpers.fake_cluster import MOST_DRAFTS
from ...helpers.fake_runner import Scripts
from ...helpers.gateway_service import Service, check_refused, events

ANSWER = "the lazy dog sleeps, and the quick brown fox jumps over the runner of the relay team"
OTHER = "zzz: xyz 0123456789"
DETAILS = "completion_tokens_details"


def suffix(_: Scripts) -> Drafter:
    return make_drafter(SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=0))


def predicted(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}, "max_tokens": 100}


@pytest.fixture(params=[[Role.UNIFIED], [Role.PREFILL, Role.DECODE]], ids=["unified", "disaggregated"])
async def guessing(start: Callable[..., Service], request: pytest.FixtureRequest) -> Service:
    """A service whose engines draft from the request's own text and from its prediction."""
    service = start(*request.param, new_drafter=suffix)
    service.script_chat("hello", ANSWER)
    return service


async def usage_of(service: Service, **fields: Any) -> dict[str, Any]:
    response = await service.chat("hello", **fields)
    assert response.status_code == 200, response.text
    return response.json()["usage"]


def submitted(service: Service, role: Role) -> list[EngineRequest]:
    engines = service.cluster.members
    return [request for engine in engines if engine.record.role is role for request in engine.submitted]


async def test_a_right_prediction_is_accepted(guessing: Service) -> None:
    plain = (await guessing.chat("hello", max_tokens=100)).json()
    answer = (await guessing.chat("hello", **predicted(ANSWER))).json()
    assert answer["choices"] == plain["choices"]
    details = answer["usage"].pop(DETAILS)
    assert details["accepted_prediction_tokens"] >= 10
    for usage in (answer["usage"], plain["usage"]):
        usage.pop("prompt_tokens_details")
    assert answer["usage"] == plain["usage"], "rejected drafts must not count as completion tokens"
    assert DETAILS not in plain["usage"]


async def test_text_parts_are_one_prediction(guessing: Service) -> None:
    parts = [{"type": "text", "text": ANSWER[:20]}, {"type": "text", "text": ANSWER[20:]}]
    assert await usage_of(guessing, **predicted(parts)) == await usage_of(guessing, **predicted(ANSWER))


async def test_a_wrong_prediction_is_rejected_and_changes_nothing(guessing: Service) -> None:
    wrong = " ".join(word + " of" for word in ANSWER.split())
    answer = (await guessing.chat("hello", **predicted(wrong))).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert answer["usage"][DETAILS]["rejected_prediction_tokens"] > 0


async def test_accepted_and_rejected_are_the_drafts_that_engines_have_checked(guessing: Service) -> None:
    usage = await usage_of(guessing, **predicted(ANSWER[:30] + OTHER))
    stats = [engine.core.stats().speculation for engine in guessing.cluster.members]
    accepted = sum(each.num_accepted_tokens for each in stats if each is not None)
    checked = sum(each.num_draft_tokens for each in stats if each is not None)
    assert 0 < accepted < checked
    assert usage[DETAILS] == {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": checked - accepted,
    }, "every draft came from the prediction"


async def test_a_stream_has_the_same_usage(guessing: Service) -> None:
    whole = await usage_of(guessing, **predicted(ANSWER))
    for options in ({}, {"continuous_usage_stats": True}, {"resumable": True}):
        fields = {**predicted(ANSWER), "stream": True, "stream_options": {"include_usage": True, **options}}
        response = await guessing.chat("hello", **fields)
        lines = [line for line in response.text.splitlines(keepends=True) if not line.startswith("id: ")]
        *_, last, done = events("".join(lines))
        assert done == "[DONE]"
        assert last["usage"][DETAILS] == whole[DETAILS]


async def test_choices_are_counted_together(guessing: Service) -> None:
    one = await usage_of(guessing, **predicted(ANSWER))
    three = await usage_of(guessing, **predicted(ANSWER), n=3)
    assert three[DETAILS]["accepted_prediction_tokens"] == 3 * one[DETAILS]["accepted_prediction_tokens"]


@pytest.mark.parametrize("stop", ["fox ju", "sleeps"])
async def test_predicted_tokens_that_a_stop_string_removes_count_as_rejected(guessing: Service, stop: str) -> None:
    """The engine accepted these drafts, but they are not part of the completion."""
    usage = await usage_of(guessing, **predicted(ANSWER), stop=stop)
    details = usage[DETAILS]
    assert details["accepted_prediction_tokens"] < usage["completion_tokens"]
    accepted_by_engines = sum(
        stats.num_accepted_tokens
        for engine in guessing.cluster.members
        if (stats := engine.core.stats().speculation) is not None
    )
    assert details["accepted_prediction_tokens"] <= accepted_by_engines


async def test_the_timeline_counts_drafts_without_a_prediction_too(guessing: Service) -> None:
    guessing.script_chat("hello", "the dog and the fox, " * 5)
    answer = (await guessing.chat("hello", max_tokens=100, baton_timeline=True)).json()
    assert DETAILS not in answer["usage"]
    (timeline,) = answer["baton_timeline"]
    assert 0 < timeline["num_accepted_tokens"] <= timeline["num_draft_tokens"]
    assert timeline["num_draft_tokens"] <= MOST_DRAFTS * timeline["num_drafts"]


async def test_engines_without_drafts_accept_a_prediction(service: Service) -> None:
    service.script_chat("hello", ANSWER)
    answer = (await service.chat("hello", **predicted(ANSWER), baton_timeline=True)).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert answer["usage"][DETAILS] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert set(answer["baton_timeline"][0]) == {"latency_s", "parts"}


async def test_a_prediction_is_sent_to_the_engine_that_decodes(start: Callable[..., Service]) -> None:
    service = start(Role.PREFILL, Role.DECODE, new_drafter=suffix)
    service.script_chat("hello", ANSWER)
    await usage_of(service, **predicted(ANSWER))
    assert [request.prediction_token_ids for request in submitted(service, Role.PREFILL)] == [[]]
    assert [request.prediction_token_ids for request in submitted(service, Role.DECODE)] == [
        service.tokenizer.encode(ANSWER)
    ]


async def test_drafts_of_all_attempts_are_counted_together(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, Role.UNIFIED, new_drafter=suffix)
    service.script_chat("hello", ANSWER)
    for engine in service.cluster.members:
        engine.die_after_tokens = 12
        engine.on_death = lambda: [setattr(each, "die_after_tokens", None) for each in service.cluster.members]
    answer = (await service.chat("hello", **predicted(ANSWER))).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER
    first, second = [engine.submitted for engine in service.cluster.members]
    assert len(first) == len(second) == 1
    again = max(first + second, key=lambda request: request.generation)
    assert again.output_token_ids
    assert again.prediction_token_ids == service.tokenizer.encode(ANSWER)
    details = answer["usage"][DETAILS]
    assert details["accepted_prediction_tokens"] > len(again.output_token_ids)


async def test_a_prediction_is_no_part_of_the_prompt(guessing: Service) -> None:
    """Equal prompts share their KV, whatever their predictions are."""
    first, second = [
        (await guessing.chat("hello world, hello there, " * 5, **predicted(text))).json()["usage"]
        for text in (ANSWER, OTHER)
    ]
    assert second["prompt_tokens"] == first["prompt_tokens"]
    assert second["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("prediction", ["", "the", OTHER])
async def test_drafts_from_other_texts_do_not_count_as_prediction_tokens(guessing: Service, prediction: str) -> None:
    """The answer repeats itself, so engines accept drafts that the client has not predicted."""
    guessing.script_chat("hello", "the dog and the fox, " * 5)
    answer = (await guessing.chat("hello", **predicted(prediction), baton_timeline=True)).json()
    assert answer["baton_timeline"][0]["num_accepted_tokens"] > 5
    assert answer["usage"][DETAILS]["accepted_prediction_tokens"] == 0


async def test_null_is_no_prediction(service: Service) -> None:
    service.script_chat("hello", ANSWER)
    assert DETAILS not in await usage_of(service, prediction=None, max_tokens=100)


@pytest.mark.slow
async def test_a_large_body_with_a_prediction_is_read_in_another_process(guessing: Service) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = json.dumps({"model": "tiny", "messages": messages, **predicted(ANSWER)})
    headers = {"content-type": "application/json"}
    small, large = [
        (await guessing.http.post("/v1/chat/completions", content=" " * blanks + body, headers=headers)).json()
        for blanks in (0, 200_000)
    ]
    assert large["usage"][DETAILS] == small["usage"][DETAILS]
    assert large["choices"] == small["choices"]


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": ("text", "prediction"),
    "no type": ({"content": "a"}, "prediction.type"),
    "another type": ({"type": "text", "content": "a"}, "prediction.type"),
    "no content": ({"type": "content"}, "prediction.content"),
    "content of another type": ({"type": "content", "content": 5}, "prediction.content"),
    "a part of another type": (
        {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "text": "b"}]},
        "prediction.content[1].type",
    ),
    "a part without text": ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
    "a field that is not known": ({"type": "content", "content": "a", "weight": 1}, "prediction.weight"),
    "no answer is as long": ({"type": "content", "content": "fox " * 300}, "prediction.content"),
    "far too long": ({"type": "content", "content": "zq" * 100_000}, "prediction.content"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("prediction", "param"), REFUSED.values(), ids=REFUSED)
async def test_other_predictions_are_refused(service: Service, prediction: Any, param: str) -> None:
    response = await service.chat("hello", prediction=prediction)
    assert repr(param.rpartition(".")[2]).strip("'") in check_refused(response, 400, param)


async def test_completions_refuse_a_prediction(service: Service) -> None:
    response = await service.complete("hello", prediction={"type": "content", "content": "a"})
    check_refused(response, 400, "prediction", "unsupported_parameter")
