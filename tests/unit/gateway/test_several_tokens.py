"""Engines that emit several tokens in a step: clients get the same as from engines that emit one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.model import ServedModel
from baton.engine.core.speculation.drafter import Drafter
from baton.engine.offline.bench_drafts import InformedDrafter

from ...helpers.fake_runner import Scripts
from ...helpers.gateway_service import Service, events
from ...helpers.reasoning_model import CUT, FOLD, HELLO, TOOLS

PROMPT = "the fox"
ANSWER = " jumps over the lazy dog, the café ☕ and the dog: hello there, hello 世界. the end of the fox"
REASONED = f"<think>\nis it the fox or the dog?\n</think>\n\nthe dog, {ANSWER}"
CALLED = f"<think>\nis it?\n</think>\n\ncalls: {CUT}\n{FOLD}"
CHAT_TOOLS = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
MESSAGE_TOOLS = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in TOOLS]
OF_THE_RUN = {"id", "created", "created_at", "completed_at", "call_id", "item_id", "sequence_number", "signature"}


def knowing(errors: float) -> Callable[[Scripts], Drafter]:
    """Return a factory of drafters that draft from the scripts, with a share of wrong drafts."""

    def new(scripts: Scripts) -> Drafter:
        return InformedDrafter(lambda _, prompt: [*prompt, *scripts.get(tuple(prompt), ())], 1 - errors, 256)

    return new


@pytest.fixture(params=[[Role.UNIFIED], [Role.PREFILL, Role.DECODE]], ids=["unified", "disaggregated"])
async def pair(
    start: Callable[..., Service], thinker: ServedModel, request: pytest.FixtureRequest
) -> tuple[Service, Service]:
    """Return two services with the same answers: one emits a token in a step, the other up to five."""
    one = start(*request.param, served=thinker)
    several = start(*request.param, served=thinker, new_drafter=knowing(0.0))
    for service in (one, several):
        service.script(PROMPT, ANSWER)
    return one, several


def cleaned(value: Any) -> Any:
    """Remove fields that differ from run to run."""
    if isinstance(value, dict):
        return {key: cleaned(each) for key, each in value.items() if key not in OF_THE_RUN}
    return [cleaned(each) for each in value] if isinstance(value, list) else value


async def post(service: Service, route: str, body: dict[str, Any]) -> Any:
    """Return the answer as a whole, or the parsed events of a stream."""
    headers = {"x-request-id": "the-same"}
    response = await service.http.post(route, json={"model": "tiny", **body}, headers=headers)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return cleaned(response.json())
    lines = response.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def joined(told: list[Any]) -> dict[Any, Any]:
    """Join the events: texts and lists at the same path are concatenated; of other values the last one counts."""
    whole: dict[Any, Any] = {}

    def add(path: tuple[Any, ...], value: Any) -> None:
        name = path[-1] if path else ""
        if isinstance(value, dict):
            for key, each in value.items():
                if key not in OF_THE_RUN:
                    add((*path, key), each)
        elif name in PIECES and value is not None:
            whole[path] = whole.get(path, value[:0]) + value
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for each in value:
                add((*path, each.get("index", each.get("output_index", 0))), each)
        elif value is not None:
            whole[path] = value

    for event in told:
        kind, place = event.get("type", ""), (event.get("output_index", event.get("index", "")))
        add((kind, place), event)
    return whole


PIECES = {
    *("text", "content", "reasoning", "reasoning_content", "arguments", "delta", "partial_json", "thinking"),
    *("tokens", "token_logprobs", "top_logprobs", "text_offset", "token_ids", "logprobs"),
}

OF_COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop string": {"stop": ["dog: hel", "never"]},
    "stop string within a token": {"stop": "azy d"},
    "stop string that is shown": {"stop": "lazy", "include_stop_str_in_output": True},
    "stop string after min_tokens": {"stop": "the", "min_tokens": 11},
    "stop token": {"stop_token_ids": [11, 97, 46]},
    "stop token after min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(60, 300, 7))},
    "logprobs": {"logprobs": 2},
    "logprobs and a stop string": {"logprobs": 1, "stop": "there, h"},
    "logprobs and echo": {"logprobs": 1, "echo": True},
    "token ids": {"return_token_ids": True, "stop": "the end"},
    "three choices": {"n": 3, "logprobs": 0},
    **{f"{most} tokens": {"max_tokens": most} for most in (1, 2, 5, 6, 7, 11)},
    "7 tokens with logprobs": {"max_tokens": 7, "logprobs": 1},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fields", OF_COMPLETIONS.values(), ids=OF_COMPLETIONS)
async def test_completions_are_the_same(pair: tuple[Service, Service], fields: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0.0, **fields}
    one, several = [await post(service, "/v1/completions", body) for service in pair]
    assert several == one
    if body.get("echo") and body.get("logprobs"):
        return  # log probabilities of prompts are not streamed
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    first, second = [await post(service, "/v1/completions", streamed) for service in pair]
    assert joined(second) == joined(first)
    assert second[-1]["usage"]["completion_tokens"] == one["usage"]["completion_tokens"]
    assert (
        "".join(event["choices"][0]["text"] for event in second[:-1] if event["choices"][0]["index"] == 0)
        == (one["choices"][0]["text"])
    )
    for service in pair:
        await service.cluster.settled()


OF_CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop string": {"stop": "dog: hel"},
    "stop string in a thought": {"stop": "fox or"},
    "logprobs": {"logprobs": True, "top_logprobs": 1},
    "token ids": {"return_token_ids": True},
    "two choices": {"n": 2},
    "9 tokens": {"max_tokens": 9},
}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("answer", [REASONED, CALLED], ids=["words", "calls"])
@pytest.mark.parametrize("fields", OF_CHATS.values(), ids=OF_CHATS)
async def test_chats_are_the_same(pair: tuple[Service, Service], fields: dict[str, Any], answer: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "tools": CHAT_TOOLS, **fields}
    for service in pair:
        service.script(f"cut fold {HELLO}", answer)
    one, several = [await post(service, "/v1/chat/completions", body) for service in pair]
    assert several == one
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    first, second = [await post(service, "/v1/chat/completions", streamed) for service in pair]
    assert joined(second) == joined(first)
    assert len(second) < len(first) or body.get("max_tokens")


@pytest.mark.exhaustive
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("answer", [REASONED, CALLED], ids=["words", "calls"])
@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 1}, {"max_output_tokens": 17}], ids=str)
async def test_responses_are_the_same(
    pair: tuple[Service, Service], fields: dict[str, Any], answer: str, stream: bool
) -> None:
    for service in pair:
        service.script(f"cut fold {HELLO}", answer)
    body = {"input": "hello", "tools": TOOLS, "stream": stream, **fields}
    one, several = [await post(service, "/v1/responses", body) for service in pair]
    if not stream:
        assert several == one
        assert one["usage"]["output_tokens_details"]["reasoning_tokens"] > 5
        return
    assert cleaned(several[-1]) == cleaned(one[-1])
    for kind in ("output_text", "reasoning_text", "function_call_arguments"):
        texts = [
            "".join(event["delta"] for event in told if event["type"] == f"response.{kind}.delta")
            for told in (one, several)
        ]
        assert texts[0] == texts[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("answer", [REASONED, CALLED], ids=["words", "calls"])
@pytest.mark.parametrize("fields", [{}, {"stop_sequences": ["dog, "]}, {"max_tokens": 17}], ids=str)
async def test_messages_are_the_same(
    pair: tuple[Service, Service], fields: dict[str, Any], answer: str, stream: bool
) -> None:
    for service in pair:
        service.script(f"cut fold {HELLO}", answer)
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "max_tokens": 200, "tools": MESSAGE_TOOLS, "stream": stream, **fields}
    one, several = [await post(service, "/v1/messages", body) for service in pair]
    assert (joined(several) == joined(one)) if stream else (several == one)


async def test_usage_in_each_chunk_counts_up_to_the_same_number(pair: tuple[Service, Service]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PROMPT, "max_tokens": 200, "stop": "the end", "stream": True, "stream_options": options}
    counts = [
        [event["usage"]["completion_tokens"] for event in await post(service, "/v1/completions", body)]
        for service in pair
    ]
    assert all(each == sorted(each) for each in counts)
    assert counts[0][-1] == counts[1][-1]
    assert len(counts[1]) < len(counts[0])


async def test_events_of_a_resumable_stream_are_the_same_ones(pair: tuple[Service, Service]) -> None:
    """Another gateway, with other engines, may continue the stream: see `resume.py`."""
    options = {"include_usage": True, "resumable": True}
    body = {"prompt": PROMPT, "max_tokens": 200, "logprobs": 1, "stream": True, "stream_options": options}
    one, several = [await post(service, "/v1/completions", body) for service in pair]
    assert cleaned(several) == cleaned(one)


async def test_metrics_count_every_token_and_the_time_between_steps(pair: tuple[Service, Service]) -> None:
    samples, num_events = [], []
    for service in pair:
        body = {"prompt": PROMPT, "max_tokens": 200, "stream": True}
        response = await service.complete(**body)
        num_events.append(len(events(response.text)) - 1)
        samples.append(await service.metrics())
    tokens = 'baton_generation_tokens_total{model_name="tiny"}'
    between = 'baton_inter_token_latency_seconds_count{model_name="tiny"}'
    assert samples[0][tokens] == samples[1][tokens]
    assert samples[0][between] == samples[0][tokens] - 1
    assert samples[1][between] == num_events[1] - 1 < samples[0][between]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("errors", [0.2, 0.5])
async def test_wrong_drafts_change_nothing(
    start: Callable[..., Service], pair: tuple[Service, Service], errors: float
) -> None:
    often_wrong = start(Role.PREFILL, Role.DECODE, new_drafter=knowing(errors))
    often_wrong.script(PROMPT, ANSWER)
    for fields in OF_COMPLETIONS.values():
        body = {"prompt": PROMPT, "max_tokens": 200, **fields}
        assert await post(often_wrong, "/v1/completions", body) == await post(pair[0], "/v1/completions", body)


async def test_an_answer_continues_after_its_engine_died(
    start: Callable[..., Service], pair: tuple[Service, Service]
) -> None:
    service = start(Role.UNIFIED, Role.UNIFIED, new_drafter=knowing(0.0))
    service.script(PROMPT, ANSWER)
    for engine in service.cluster.members:
        engine.die_after_tokens = 12
    service.cluster.members[1].die_after_tokens = None
    body = {"prompt": PROMPT, "max_tokens": 200, "logprobs": 1, "seed": 3}
    expected = await post(pair[0], "/v1/completions", body)
    for _ in range(3):
        assert await post(service, "/v1/completions", body) == expected
