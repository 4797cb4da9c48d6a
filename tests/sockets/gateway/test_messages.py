"""`/v1/messages`: the same answers as for chats, as content blocks and events of Anthropic's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.api.anthropic_answer import readable_input
from baton.cluster.gateway.bodies.body import INLINE_BYTES
from baton.cluster.gateway.model import ServedModel
from baton.engine.text import Tokenizer

from ...helpers.gateway_service import Service
from ...helpers.reasoning_model import CUT, FOLD, HELLO, SIZE, TEMPLATE, reasoning_model
from .anthropic_api import TOLD, TOOLS, ask, block, names, put_together, stream, user, whole

SWITCH = "{% if enable_thinking is defined %}thinks {{ enable_thinking }} {% endif %}"
EFFORT = "{% if reasoning_effort %}effort {{ reasoning_effort }} {% endif %}"


@pytest.mark.slow
async def test_content_is_a_text_block(responses: Service) -> None:
    responses.script(HELLO, "the 🦊 sleeps")
    answer = await ask(responses, headers={"x-request-id": "r1", "anthropic-version": "2023-06-01"})
    message = whole(answer)
    assert message["content"] == [{"type": "text", "text": "the 🦊 sleeps"}]
    assert (message["id"], message["role"], message["type"]) == ("msg_r1", "assistant", "message")
    assert (message["stop_reason"], message["stop_sequence"], message["model"]) == ("end_turn", None, "tiny")
    assert message["usage"] == {
        "input_tokens": len(responses.tokenizer.encode(HELLO)),
        "output_tokens": len(responses.tokenizer.encode("the 🦊 sleeps")) + 1,
        "output_tokens_details": {"thinking_tokens": 0},
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
    }
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "r1"
    assert answer.headers["x-baton-path"]


async def test_cached_tokens_are_counted_separately(responses: Service) -> None:
    long = "hello world, what is the name of the fox? " * 3
    first, second = [whole(await ask(responses, long, max_tokens=5))["usage"] for _ in range(2)]
    assert second["cache_read_input_tokens"] > 0
    assert second["input_tokens"] + second["cache_read_input_tokens"] == first["input_tokens"]


async def test_a_stream_has_blocks_of_thinking_text_and_calls(responses: Service) -> None:
    responses.script(TOLD, f"<think>\nthe fox?\n</think>\n\nWell.\n{CUT}\n{FOLD}")
    events = stream(await ask(responses, stream=True, tools=TOOLS))
    assert names(events) == [
        "message_start",
        *block("thinking_delta", "signature_delta"),
        *block("text_delta"),
        *block("input_json_delta"),
        *block("input_json_delta"),
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    message = put_together(events)
    thought, text, cut, fold = message["content"]
    assert (thought["thinking"], text["text"]) == ("the fox?", "Well.")
    assert thought["signature"]
    assert (cut["name"], cut["input"], fold["name"], fold["input"]) == ("cut", {"size": 1}, "fold", {"size": 2})
    assert cut["id"] != fold["id"]
    assert message["stop_reason"] == "tool_use"
    assert 0 < message["usage"]["output_tokens_details"]["thinking_tokens"] < message["usage"]["output_tokens"]


async def test_the_whole_answer_equals_the_stream(responses: Service) -> None:
    responses.script(TOLD, f"<think>the fox?</think>Well.\n{CUT}")
    named = {"x-request-id": "r1"}
    streamed = put_together(stream(await ask(responses, stream=True, tools=TOOLS, headers=named)))
    at_once = whole(await ask(responses, tools=TOOLS, headers=named))
    for message in (streamed, at_once):
        message["content"][-1].pop("id")  # depends on the time
        for field in ("input_tokens", "cache_read_input_tokens"):
            message["usage"].pop(field)
    assert at_once == streamed


@pytest.mark.parametrize(
    ("answer", "kind"),
    [("the dog sleeps", "text"), (CUT.partition("}")[0], "tool_use"), ("<think>the dog", "thinking")],
)
async def test_an_answer_that_is_cut_off_says_so(responses: Service, answer: str, kind: str) -> None:
    responses.script(TOLD, answer)
    length = len(responses.tokenizer.encode(answer)) - 1
    events = stream(await ask(responses, stream=True, tools=TOOLS, max_tokens=length))
    assert names(events)[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    message = whole(await ask(responses, tools=TOOLS, max_tokens=length))
    assert (message["stop_reason"], [each["type"] for each in message["content"]]) == ("max_tokens", [kind])
    assert message["usage"]["output_tokens"] == length


async def test_a_call_without_its_last_token_is_not_to_be_run(responses: Service) -> None:
    responses.script(TOLD, f"{CUT}\n{FOLD.partition('}')[0]}")
    message = whole(await ask(responses, tools=TOOLS))
    assert message["stop_reason"] == "end_turn"
    assert [each["name"] for each in message["content"]] == ["cut", "fold"]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": [1, {"b": 2}], "c": "x"}', {"a": [1, {"b": 2}], "c": "x"}),
        ('{"a": "x", "b": "y', {"a": "x"}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        *[(text, {}) for text in ("", "{", '{"a', "[1, 2]", "3", '{"a": NaN}', "}", "[" * 5000)],
    ],
)
def test_the_input_of_a_call_is_always_an_object(arguments: str, read: dict[str, Any]) -> None:
    assert json.loads(bytes(readable_input(arguments))) == read


async def test_stop_sequences_end_the_answer(responses: Service) -> None:
    responses.script(HELLO, "the dog sleeps, and so on")
    message = whole(await ask(responses, stop_sequences=["fox", " and"]))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", " and")
    assert message["content"] == [{"type": "text", "text": "the dog sleeps,"}]
    events = stream(await ask(responses, stop_sequences=[" and"], stream=True))
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " and"}


async def test_an_empty_answer_has_no_blocks(responses: Service) -> None:
    responses.script(HELLO, "")
    message = whole(await ask(responses))
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")
    assert names(stream(await ask(responses, stream=True))) == ["message_start", "message_delta", "message_stop"]


TURN = "<|im_start|>{}\n{}<|im_end|>\n".format
BEGIN = "<|im_start|>assistant\n"
CALL = {"type": "tool_use", "id": "a", "name": "cut", "input": {"size": 1}}
CALLED = {"role": "assistant", "content": [{"type": "text", "text": "Well."}, CALL]}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
WELL = "Well.<tool_call>a cut 1</tool_call>"
PROMPTS: dict[str, tuple[dict[str, Any], str]] = {
    "a system's text": ({"system": "be kind"}, TURN("system", "be kind") + HELLO),
    "a system's blocks": (
        {"system": [{"type": "text", "text": word, "cache_control": {"type": "ephemeral"}} for word in "ab"]},
        TURN("system", "a\nb") + HELLO,
    ),
    "a system that says nothing": ({"system": ""}, HELLO),
    "blocks of a user": (
        {"messages": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b", "citations": None}])]},
        TURN("user", "a\nb") + BEGIN,
    ),
    "turns that follow each other": ({"messages": [user("a"), user("b")]}, TURN("user", "a\nb") + BEGIN),
    "a later system": (
        {"messages": [user("a"), {"role": "system", "content": "s"}, user("b")]},
        TURN("user", "a") + TURN("system", "s") + TURN("user", "b") + BEGIN,
    ),
    "a call and its result": (
        {"messages": [user(), CALLED, user([{**RESULT, "content": "1"}, {"type": "text", "text": "so?"}])]},
        TURN("user", "hello") + TURN("assistant", WELL) + TURN("tool", "1") + TURN("user", "so?") + BEGIN,
    ),
    "a result of blocks": (
        {"messages": [user(), CALLED, user([{**RESULT, "content": [{"type": "text", "text": "1"}] * 2}])]},
        TURN("user", "hello") + TURN("assistant", WELL) + TURN("tool", "1\n1") + BEGIN,
    ),
    "a result that is an error": (
        {"messages": [user(), CALLED, user([{**RESULT, "content": "no", "is_error": True}])]},
        TURN("user", "hello") + TURN("assistant", WELL) + TURN("tool", "Error: no") + BEGIN,
    ),
    "a result without a word": (
        {"messages": [user(), CALLED, user([RESULT])]},
        TURN("user", "hello") + TURN("assistant", WELL) + TURN("tool", "") + BEGIN,
    ),
    "thoughts that are sent back": (
        {
            "messages": [
                user(),
                {"role": "assistant", "content": [THOUGHT, {"type": "redacted_thinking", "data": "x"}]},
                {"role": "assistant", "content": "so"},
                user("b"),
            ]
        },
        TURN("user", "hello") + TURN("assistant", "<think>hm</think>so") + TURN("user", "b") + BEGIN,
    ),
    "tools": ({"tools": TOOLS}, TOLD),
    "tools that may not be called": ({"tools": TOOLS, "tool_choice": {"type": "none"}}, HELLO),
    "an answer that is begun": (
        {"messages": [user(), {"role": "assistant", "content": "the dog"}]},
        TURN("user", "hello") + BEGIN + "the dog",
    ),
}


@pytest.mark.parametrize(("fields", "prompt"), PROMPTS.values(), ids=PROMPTS)
async def test_requests_become_prompts(
    start: Callable[..., Service], thinker: ServedModel, fields: dict[str, Any], prompt: str
) -> None:
    service = start(Role.UNIFIED, served=thinker)
    service.script(prompt, "yes")
    body = {"messages": [user()], **fields}
    assert whole(await ask(service, max_tokens=20, **body))["content"] == [{"type": "text", "text": "yes"}]
    counted = await service.http.post("/v1/messages/count_tokens", json={"model": "tiny", **body})
    assert (counted.status_code, counted.json()) == (200, {"input_tokens": len(service.tokenizer.encode(prompt))})
    assert counted.headers["request-id"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, ""),
        ({"thinking": {"type": "enabled", "budget_tokens": 20}}, "thinks True "),
        ({"thinking": {"type": "adaptive"}}, "thinks True "),
        ({"thinking": {"type": "disabled"}}, "thinks False "),
        ({"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": False}}, "thinks False "),
    ],
)
async def test_thinking_is_switched(
    start: Callable[..., Service], model: ServedModel, tokenizer: Tokenizer, fields: dict[str, Any], told: str
) -> None:
    service = start(Role.UNIFIED, served=reasoning_model(model, tokenizer, SWITCH + TEMPLATE))
    service.script(told + HELLO, "yes")
    assert whole(await ask(service, **fields))["content"] == [{"type": "text", "text": "yes"}]


async def test_an_effort_is_passed_to_templates_with_efforts(
    start: Callable[..., Service], model: ServedModel, tokenizer: Tokenizer
) -> None:
    service = start(Role.UNIFIED, served=reasoning_model(model, tokenizer, EFFORT + TEMPLATE))
    service.script("effort low " + HELLO, "yes")
    assert whole(await ask(service, output_config={"effort": "low"}))["content"] == [{"type": "text", "text": "yes"}]


@pytest.mark.parametrize(
    ("choice", "calls"),
    [({"type": "any"}, {"cut", "fold"}), ({"type": "tool", "name": "fold"}, {"fold"})],
)
@pytest.mark.parametrize("streamed", [True, False])
async def test_required_calls_fit_their_schema(
    responses: Service, choice: dict[str, Any], calls: set[str], streamed: bool
) -> None:
    """Only the grammar makes calls fit: the model reasons first, and then writes random tokens."""
    responses.script(TOLD, "<think>the fox?</think>\n\n", end=False)
    chosen = {**choice, "disable_parallel_tool_use": True}
    answer = await ask(responses, tools=TOOLS, tool_choice=chosen, stream=streamed)
    message = put_together(stream(answer)) if streamed else whole(answer)
    (call,) = [each for each in message["content"] if each["type"] == "tool_use"]
    assert message["stop_reason"] == "tool_use"
    assert call["name"] in calls
    assert call["input"]["size"] in (1, 2, 3)


async def test_an_answer_fits_its_schema(responses: Service) -> None:
    wanted = {"format": {"type": "json_schema", "schema": SIZE}}
    responses.script(HELLO, "<think>the fox?</think>\n\n", end=False)
    message = whole(await ask(responses, output_config=wanted))
    assert json.loads(message["content"][-1]["text"])["size"] in (1, 2, 3)


@pytest.mark.slow
async def test_a_large_body_is_read_in_another_process_with_the_same_result(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED)
    text = {"type": "text", "text": "hello"}
    large = [user([{**text, "cache_control": {"type": "ephemeral", "pad": "x" * INLINE_BYTES}}])]
    small = whole(await ask(service, max_tokens=3, seed=1))
    assert whole(await ask(service, large, max_tokens=3, seed=1))["content"] == small["content"]
    path = "/v1/messages/count_tokens"
    counts = [
        (await service.http.post(path, json={"model": "tiny", "messages": each})).json() for each in (large, [user()])
    ]
    assert counts[0] == counts[1]
    assert (await ask(service, large, tool_choice={"type": "any"})).json()["error"]["type"] == "invalid_request_error"


async def test_the_timeline_comes_with_the_end(responses: Service) -> None:
    responses.script(HELLO, "the dog")
    events = stream(await ask(responses, stream=True, baton_timeline=True))
    (at_once,) = whole(await ask(responses, baton_timeline=True))["baton_timeline"]
    assert events[-2]["baton_timeline"][0].keys() == at_once.keys()
    assert "baton_timeline" not in whole(await ask(responses))


async def test_a_deadline_ends_a_request_and_a_disconnect_aborts_it(responses: Service) -> None:
    for engine in responses.cluster.members:
        engine.step_s = 0.02
    late = await ask(responses, headers={"request-timeout-ms": "60"}, ignore_eos=True)
    error = late.json()["error"]
    assert (late.status_code, error["type"], error["gpu_time_spent"]) == (408, "timeout_error", True)
    assert error["details"] == {"error_code": "request_timeout"}
    body = {"model": "tiny", "messages": [user()], "stream": True, "ignore_eos": True, "max_tokens": 100}
    async with responses.over_tcp() as url, httpx.AsyncClient(base_url=url, timeout=20) as client:
        async with client.stream("POST", "/v1/messages", json=body) as response:
            assert await anext(response.aiter_lines()) == "event: message_start"
        async with asyncio.timeout(20):
            while not (await responses.metrics())["baton_client_disconnects_total"]:
                await asyncio.sleep(0.005)
    await responses.cluster.settled()


async def test_messages_share_limits_paths_and_metrics_with_other_requests(start: Callable[..., Service]) -> None:
    service = start(Role.PREFILL, Role.DECODE, api_keys=["right"], max_inflight_per_key=1)
    assert (await ask(service, headers={"X-data-parallel-rank": "7", "x-api-key": "right"})).status_code == 400
    answer = await ask(service, headers={"x-api-key": "right"}, max_tokens=3)
    assert whole(answer)["stop_reason"] == "max_tokens"
    assert answer.headers["x-baton-path"].startswith("disaggregated")
    samples = await service.metrics()
    counted = [name for name in samples if '"/v1/messages"' in name and '"200"' in name and "created" not in name]
    assert [samples[name] for name in counted] == [1]


@pytest.mark.parametrize("roles", [[Role.UNIFIED], [Role.PREFILL, Role.DECODE]], ids=["unified", "disaggregated"])
async def test_a_stream_continues_at_another_gateway_without_a_gap_or_a_repetition(
    start: Callable[..., Service], thinker: ServedModel, roles: list[Role]
) -> None:
    first, second = start(Role.UNIFIED, served=thinker), start(*roles, served=thinker)
    for service in (first, second):
        service.script(TOLD, f"<think>the fox?</think>Well, 🦊.\n{CUT}")
    asked: dict[str, Any] = {"stream": True, "stream_options": {"resumable": True}, "tools": TOOLS}

    async def told(service: Service, **headers: str) -> list[tuple[str | None, dict[str, Any]]]:
        answer = await ask(service, headers={name.replace("_", "-"): value for name, value in headers.items()}, **asked)
        assert answer.status_code == 200, answer.text
        found = []
        for part in answer.text.split("\n\n")[:-1]:
            lines = dict(line.split(": ", 1) for line in part.split("\n"))
            event = json.loads(lines["data"])
            assert lines["event"] == event["type"]
            event.pop("usage", None)  # engines have different prefixes cached
            found.append((lines.get("id"), event))
        return found

    events = await told(first)
    assert [event["type"] for _, event in events].count("message_start") == 1
    ids = [number for number, (event_id, _) in enumerate(events) if event_id is not None]
    assert len(ids) > 10
    for number in ids:
        event_id = events[number][0]
        assert event_id is not None
        assert await told(second, last_event_id=event_id) == events[number + 1 :]


async def test_only_a_resumable_stream_can_be_resumed(responses: Service) -> None:
    refused = await ask(responses, headers={"last-event-id": "1.x"}, stream=True)
    assert (refused.status_code, refused.json()["error"]["details"]["error_code"]) == (400, "not_resumable")
    refused = await ask(responses, stream_options={"resumable": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options")
