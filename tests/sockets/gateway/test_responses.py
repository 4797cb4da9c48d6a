"""`/v1/responses`: the same answers as for chats, as output items."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.model import ServedModel
from baton.engine.text import Tokenizer

from ...helpers.gateway_service import Service
from ...helpers.reasoning_model import CUT, FOLD, HELLO, SIZE, TEMPLATE, TOOLS, reasoning_model
from .response_checks import blocks, names, stream, whole

EFFORT = "{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}"
SWITCH = "{% if enable_thinking is false %}no thoughts{% endif %}"
MESSAGE = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
REASONING = [name.replace("output_text", "reasoning_text") for name in MESSAGE]
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
DONE = ["output_item.done"]


async def ask(
    service: Service, given: Any = "hello", headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    return await service.http.post("/v1/responses", json={"model": "tiny", "input": given, **fields}, headers=headers)


def items_of(response: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return each item's type, with its text or its call."""
    return [
        ("function_call", (item["name"], json.loads(item["arguments"])))
        if item["type"] == "function_call"
        else (item["type"], "".join(part["text"] for part in item["content"]))
        for item in response["output"]
    ]


async def test_content_is_a_message_item(responses: Service) -> None:
    given = "hello world, what is the name of the fox?"
    prompt = HELLO.replace("hello", given)
    responses.script(prompt, "the 🦊 sleeps")
    response = whole(await ask(responses, given, metadata={"a": "b"}, user="me", temperature=0.5, instructions=None))
    assert items_of(response) == [("message", "the 🦊 sleeps")]
    assert (response["status"], response["store"], response["error"]) == ("completed", False, None)
    assert (response["metadata"], response["user"], response["temperature"]) == ({"a": "b"}, "me", 0.5)
    assert response["completed_at"] >= response["created_at"]
    tokens = len(responses.tokenizer.encode("the 🦊 sleeps")) + 1
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(responses.tokenizer.encode(prompt)), tokens)
    assert usage["total_tokens"] == usage["input_tokens"] + tokens
    again = whole(await ask(responses, given))["usage"]
    assert again["input_tokens_details"]["cached_tokens"] > 0
    assert sum(again["input_tokens_details"].values()) == usage["input_tokens"]


async def test_a_stream_of_content_has_one_message_item(responses: Service) -> None:
    responses.script(HELLO, "the 🦊 sleeps")
    events = stream(await ask(responses, stream=True))
    assert names(events) == ["created", "in_progress", *MESSAGE, *DONE, "completed"]
    assert items_of(events[-1]["response"]) == [("message", "the 🦊 sleeps")]
    assert len([event for event in events if event["type"].endswith("delta")]) > 3
    assert events[0]["response"]["usage"] is None


async def test_a_stream_has_items_of_reasoning_content_and_calls(responses: Service) -> None:
    responses.script("cut fold " + HELLO, f"<think>\nthe fox?\n</think>\n\nWell.\n{CUT}\n{FOLD}")
    events = stream(await ask(responses, stream=True, tools=TOOLS))
    begun = ["created", "in_progress"]
    assert names(events) == [*begun, *REASONING, *DONE, *MESSAGE, *DONE, *CALL, *DONE, *CALL, *DONE, "completed"]
    said = [("reasoning", "the fox?"), ("message", "Well."), ("function_call", ("cut", {"size": 1}))]
    assert items_of(events[-1]["response"]) == [*said, ("function_call", ("fold", {"size": 2}))]
    assert len({item["id"] for item in events[-1]["response"]["output"]}) == 4
    assert len({item["call_id"] for item in events[-1]["response"]["output"][2:]}) == 2


async def test_the_whole_answer_equals_the_end_of_the_stream(responses: Service) -> None:
    responses.script("cut fold " + HELLO, f"<think>the fox?</think>Well.\n{CUT}")
    named = {"x-request-id": "r1"}
    streamed = stream(await ask(responses, stream=True, tools=TOOLS, headers=named))[-1]["response"]
    at_once = whole(await ask(responses, tools=TOOLS, headers=named))
    for response in (streamed, at_once):
        response["created_at"] = response["completed_at"] = response["usage"]["input_tokens_details"] = None
        response["output"][-1].pop("call_id")  # depends on the time
    assert at_once == streamed
    assert at_once["id"] == "resp_r1"
    assert at_once["tools"][0] == {
        "type": "function",
        "name": "cut",
        "parameters": SIZE,
        "strict": False,
        "description": None,
    }


@pytest.mark.parametrize(
    ("answer", "kind"),
    [("the dog sleeps", "message"), (CUT.partition("}")[0], "function_call"), ("<think>the dog", "reasoning")],
)
async def test_an_answer_that_is_cut_off_is_incomplete(responses: Service, answer: str, kind: str) -> None:
    told = "cut fold " + HELLO
    responses.script(told, answer)
    length = len(responses.tokenizer.encode(answer)) - 1
    events = stream(await ask(responses, stream=True, tools=TOOLS, max_output_tokens=length))
    response = events[-1]["response"]
    assert names(events)[-2:] == ["output_item.done", "incomplete"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (response["completed_at"], response["max_output_tokens"]) == (None, length)
    assert [(item["type"], item["status"]) for item in response["output"]] == [(kind, "incomplete")]
    assert whole(await ask(responses, tools=TOOLS, max_output_tokens=length))["status"] == "incomplete"


async def test_a_call_before_the_one_that_is_cut_off_is_complete(responses: Service) -> None:
    told = "cut fold " + HELLO
    responses.script(told, f"{CUT}\n{FOLD}")
    length = len(responses.tokenizer.encode(f'{CUT}\n<tool_call>\n{{"name": "fo'))
    events = stream(await ask(responses, stream=True, tools=TOOLS, max_output_tokens=length))
    response = events[-1]["response"]
    assert (response["status"], response["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
    assert [(item["type"], item["status"]) for item in response["output"]] == [("function_call", "completed")]
    assert items_of(response) == [("function_call", ("cut", {"size": 1}))]
    assert items_of(whole(await ask(responses, tools=TOOLS, max_output_tokens=length))) == items_of(response)


@pytest.mark.parametrize(
    ("answer", "fields"),
    [(f"{CUT}\n{FOLD.partition('}')[0]}", {}), (f"{CUT}\n{FOLD}", {"stop": "2"})],
    ids=["by the model", "by a stop string"],
)
async def test_an_unfinished_call_is_incomplete_in_a_complete_answer(
    responses: Service, answer: str, fields: dict[str, Any]
) -> None:
    responses.script("cut fold " + HELLO, answer)
    events = stream(await ask(responses, stream=True, tools=TOOLS, **fields))
    for response in (events[-1]["response"], whole(await ask(responses, tools=TOOLS, **fields))):
        assert (response["status"], response["incomplete_details"]) == ("completed", None)
        assert [(item["name"], item["status"]) for item in response["output"]] == [
            ("cut", "completed"),
            ("fold", "incomplete"),
        ]
        assert FOLD.partition('"arguments": ')[2].startswith(response["output"][-1]["arguments"])


@pytest.mark.parametrize(("answer", "before"), [("", []), ("<think>the dog</think>", [("reasoning", "the dog")])])
async def test_an_empty_answer_has_an_empty_message(responses: Service, answer: str, before: list[Any]) -> None:
    responses.script(HELLO, answer)
    events = stream(await ask(responses, stream=True))
    assert items_of(events[-1]["response"]) == [*before, ("message", "")]
    assert items_of(whole(await ask(responses))) == [*before, ("message", "")]


async def test_log_probabilities_are_those_of_the_content(responses: Service) -> None:
    responses.script("cut fold " + HELLO, f"<think>the 🦊?</think>\n\nWell, the 🦊.\n{CUT}")
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    events = stream(await ask(responses, stream=True, tools=TOOLS, include=include, top_logprobs=2))
    response = events[-1]["response"]
    (part,) = response["output"][1]["content"]
    assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode().strip() == "Well, the 🦊."
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
    assert response["top_logprobs"] == 2
    (same,) = whole(await ask(responses, tools=TOOLS, top_logprobs=2))["output"][1]["content"]
    assert same == part
    (alone,) = whole(await ask(responses, tools=TOOLS, include=include))["output"][1]["content"]
    assert {len(entry["top_logprobs"]) for entry in alone["logprobs"]} == {0}
    (without,) = whole(await ask(responses, tools=TOOLS))["output"][1]["content"]
    assert without["logprobs"] == []


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 1}])
async def test_reasoning_tokens_are_those_before_the_answer(responses: Service, fields: dict[str, Any]) -> None:
    thought, answer = "<think>\nthe quick 🦊?\n</think>\n\n", "the dog sleeps"
    responses.script(HELLO, thought + answer)
    usage = whole(await ask(responses, **fields))["usage"]
    ends, length = [], 0
    for token in (tokens := responses.tokenizer.encode(thought + answer)):
        length += len(responses.tokenizer.token_bytes(token))
        ends.append(length)
    thinking = sum(end <= len(thought.encode()) for end in ends)
    assert usage["output_tokens_details"]["reasoning_tokens"] == thinking > 5
    assert usage["output_tokens"] == len(tokens) + 1


CONVERSATION: list[dict[str, Any]] = [
    {"role": "developer", "content": "be short"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "a fox"}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "Well", "annotations": [], "logprobs": []}]},
    {"type": "function_call", "call_id": "a", "name": "cut", "arguments": '{"size": 1}', "status": "completed"},
    {"type": "function_call", "call_id": "b", "name": "fold", "arguments": '{"size": 2}', "id": None},
    {"type": "function_call_output", "call_id": "a", "output": "done"},
    {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "folded"}]},
    {"role": "assistant", "content": "so"},
    {"role": "assistant", "content": "long"},
    {"role": "user", "content": "bye"},
]
CONVERSATION_TEXT = (
    "cut fold <|im_start|>system\nyou fold<|im_end|>\n<|im_start|>system\nbe short<|im_end|>\n"
    "<|im_start|>user\nhello<|im_end|>\n"
    "<|im_start|>assistant\n<think>a fox</think>Well"
    "<tool_call>a cut 1</tool_call><tool_call>b fold 2</tool_call><|im_end|>\n"
    "<|im_start|>tool\ndone<|im_end|>\n<|im_start|>tool\nfolded<|im_end|>\n"
    "<|im_start|>assistant\nso<|im_end|>\n<|im_start|>assistant\nlong<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"
    "<|im_start|>assistant\n"
)


async def test_items_become_the_turns_of_a_chat(start: Callable[..., Service], thinker: ServedModel) -> None:
    service = start(Role.UNIFIED, served=thinker)
    await ask(service, CONVERSATION, instructions="you fold", tools=TOOLS, max_output_tokens=1)
    prompt = service.cluster.members[0].submitted[0].prompt_token_ids
    assert service.tokenizer.decode(prompt, skip_special_tokens=False) == CONVERSATION_TEXT


async def test_the_items_of_an_answer_can_be_sent_back(responses: Service) -> None:
    responses.script("cut fold " + HELLO, f"<think>the fox?</think>Well.\n{CUT}")
    first = whole(await ask(responses, tools=TOOLS, top_logprobs=1))
    call = first["output"][-1]
    told = [{"role": "user", "content": "hello"}, *first["output"]]
    told.append({"type": "function_call_output", "call_id": call["call_id"], "output": "1"})
    turns = f"<think>the fox?</think>Well.<tool_call>{call['call_id']} cut 1</tool_call><|im_end|>\n<|im_start|>tool\n1"
    responses.script(f"cut fold {HELLO}{turns}<|im_end|>\n<|im_start|>assistant\n", "cut")
    assert items_of(whole(await ask(responses, told, tools=TOOLS))) == [("message", "cut")]


async def test_required_calls_fit_their_schema(responses: Service) -> None:
    """Only the grammar makes calls fit: the model reasons first, and then writes random tokens."""
    responses.script("cut fold " + HELLO, "<think>the fox?</think>\n\n", end=False)
    chosen = {"type": "function", "name": "fold"}
    for choice in ("required", chosen):
        response = whole(await ask(responses, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False))
        thought, (kind, (name, arguments)) = items_of(response)
        assert thought == ("reasoning", "the fox?")
        assert kind == "function_call"
        assert name == "fold" or choice == "required"
        assert arguments["size"] in (1, 2, 3)
        assert (response["tool_choice"], response["parallel_tool_calls"]) == (choice, False)


async def test_answers_fit_the_requested_text_format(responses: Service) -> None:
    responses.script(HELLO, "<think>the fox?</think>\n\n", end=False)
    wanted = {"type": "json_schema", "name": "size", "schema": SIZE, "strict": True}
    response = whole(await ask(responses, text={"format": wanted}))
    assert response["text"]["format"] == wanted
    thought, (_, answer) = items_of(response)
    assert thought == ("reasoning", "the fox?")
    assert json.loads(answer)["size"] in (1, 2, 3)
    plain = whole(await ask(responses, text={"format": {"type": "text"}}, max_output_tokens=2))
    assert plain["text"] == {"format": {"type": "text"}}


async def test_an_effort_is_passed_to_the_template(
    start: Callable[..., Service], model: ServedModel, tokenizer: Tokenizer
) -> None:
    for template, effort, shown in ((EFFORT, "high", "effort high"), (SWITCH, "none", "no thoughts")):
        service = start(Role.UNIFIED, served=reasoning_model(model, tokenizer, TEMPLATE + template))
        response = whole(await ask(service, reasoning={"effort": effort, "summary": "auto"}, max_output_tokens=1))
        assert response["reasoning"] == {"effort": effort, "summary": "auto"}
        prompt = service.cluster.members[0].submitted[0].prompt_token_ids
        assert service.tokenizer.decode(prompt, skip_special_tokens=False) == HELLO + shown
    service = start(Role.UNIFIED, served=reasoning_model(model, tokenizer))
    assert (await ask(service, reasoning={"effort": "none"}, max_output_tokens=1)).status_code == 200
    refused = (await ask(service, reasoning={"effort": "low"})).json()["error"]
    assert (refused["param"], refused["code"]) == ("reasoning.effort", "unsupported_parameter")


async def test_failures_after_the_first_byte_are_in_the_response(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, capacity_timeout_s=0.1)
    service.script_chat("hello", "the fox jumps over the lazy dog")
    service.cluster.members[0].die_after_tokens = 4
    events = stream(await ask(service, stream=True))
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"]) == ("response.failed", "failed")
    assert (response["error"]["code"], response["error"]["type"]) == ("server_error", "service_unavailable")
    assert response["error"]["message"]
    assert [(item["type"], item["status"]) for item in response["output"]] == [("message", "incomplete")]
    assert "the fox jumps over the lazy dog".startswith(items_of(response)[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("roles", [[Role.UNIFIED], [Role.PREFILL, Role.DECODE]], ids=["unified", "disaggregated"])
async def test_a_stream_continues_at_another_gateway_with_the_next_sequence_number(
    start: Callable[..., Service], thinker: ServedModel, roles: list[Role]
) -> None:
    first, second = start(Role.UNIFIED, served=thinker), start(*roles, served=thinker)
    for service in (first, second):
        service.script("cut fold " + HELLO, f"<think>the fox?</think>Well, 🦊.\n{CUT}")
    asked = {"stream": True, "stream_options": {"resumable": True}, "tools": TOOLS}
    answer = await ask(first, **asked)
    stream(answer)
    events = blocks(answer.text)
    ids = [number for number, (event_id, _) in enumerate(events) if event_id is not None]
    assert len(ids) > 10
    for number in ids:
        event_id = events[number][0]
        assert event_id is not None
        rest = blocks((await ask(second, headers={"last-event-id": event_id}, **asked)).text)
        for _, event in (rest[-1], events[-1]):
            event["response"]["completed_at"] = event["response"]["usage"]["input_tokens_details"] = None
        assert rest == events[number + 1 :]


async def test_the_timeline_comes_with_the_last_event(responses: Service) -> None:
    responses.script(HELLO, "the dog")
    (timeline,) = stream(await ask(responses, stream=True, baton_timeline=True))[-1]["response"]["baton_timeline"]
    (at_once,) = whole(await ask(responses, baton_timeline=True))["baton_timeline"]
    assert timeline.keys() == at_once.keys()
    assert "baton_timeline" not in whole(await ask(responses))


async def test_a_deadline_ends_a_request_and_a_disconnect_aborts_it(responses: Service) -> None:
    for engine in responses.cluster.members:
        engine.step_s = 0.02
    late = await ask(responses, headers={"request-timeout-ms": "60"}, ignore_eos=True)
    assert (late.status_code, late.json()["error"]["code"]) == (408, "request_timeout")
    assert late.json()["error"]["gpu_time_spent"] is True
    body = {"model": "tiny", "input": "hello", "stream": True, "ignore_eos": True}
    async with responses.over_tcp() as url, httpx.AsyncClient(base_url=url, timeout=20) as client:
        async with client.stream("POST", "/v1/responses", json=body) as response:
            assert await anext(response.aiter_lines()) == "event: response.created"
        async with asyncio.timeout(20):
            while not (await responses.metrics())["baton_client_disconnects_total"]:
                await asyncio.sleep(0.005)
    await responses.cluster.settled()


async def test_responses_share_limits_paths_and_metrics_with_other_requests(start: Callable[..., Service]) -> None:
    service = start(Role.PREFILL, Role.DECODE, api_keys=["right"], max_inflight_per_key=1)
    assert (await ask(service)).status_code == 401
    headers = {"authorization": "Bearer right", "x-request-id": "abc", "X-data-parallel-rank": "7"}
    refused = await ask(service, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_rank")
    del headers["X-data-parallel-rank"]
    answer = await ask(service, headers=headers, max_output_tokens=3)
    assert (whole(answer)["id"], answer.headers["x-request-id"]) == ("resp_abc", "abc")
    assert answer.headers["x-baton-path"].startswith("disaggregated")
    samples = await service.metrics()
    counted = [name for name in samples if "/v1/responses" in name and '"200"' in name and "created" not in name]
    assert [samples[name] for name in counted] == [1]
