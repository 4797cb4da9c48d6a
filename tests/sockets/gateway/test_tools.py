"""Tool calls: functions that a model may ask its client to call."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.model import ServedModel
from baton.engine.structured import XGrammarBackend
from baton.engine.text import ChatTemplate, Tokenizer

from ...helpers.gateway_service import Service, events
from ...helpers.tiny_model import TEMPLATE
from .tool_calls import SIZE, TOOLS, allowed, call, calls_of, script, tool

pytestmark = pytest.mark.exhaustive

PAINT = {"type": "function", "function": {"name": "paint"}}
TWO_CALLS = "\n".join(["Well.", call("cut", '{"size": 1}'), call("fold", '{"size": 2}')])


@pytest.mark.slow
async def test_calls_are_separated_from_content(tools: Service) -> None:
    script(tools, TWO_CALLS)
    (choice,) = (await tools.chat("hello", tools=TOOLS)).json()["choices"]
    assert choice["message"]["content"] == "Well."
    assert calls_of(choice["message"]) == [("cut", {"size": 1}), ("fold", {"size": 2})]
    assert {call["type"] for call in choice["message"]["tool_calls"]} == {"function"}
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"


async def test_a_stream_sends_a_calls_name_first_and_then_its_arguments_in_pieces(tools: Service) -> None:
    script(tools, TWO_CALLS)
    *chunks, done = events((await tools.chat("hello", tools=TOOLS, stream=True)).text)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "Well."
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    begun = [piece for piece in calls if "id" in piece]
    assert [(piece["index"], piece["function"]["name"]) for piece in begun] == [(0, "cut"), (1, "fold")]
    pieces = [piece["function"]["arguments"] for piece in calls if piece["index"] == 1]
    assert "".join(pieces) == '{"size": 2}'
    assert len(pieces) > 3
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "tool_calls"]


async def test_the_official_client_assembles_calls_and_sends_their_results(tools: Service) -> None:
    script(tools, TWO_CALLS)
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    async with tools.openai() as client:
        whole = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        async with client.chat.completions.stream(model="tiny", messages=messages, tools=TOOLS) as stream:
            streamed = await stream.get_final_completion()
        messages.append(whole.choices[0].message)
        calls = whole.choices[0].message.tool_calls
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
        assert (await client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)).choices
    read = [(call.function.name, call.function.arguments) for call in streamed.choices[0].message.tool_calls]
    assert read == [(call.function.name, call.function.arguments) for call in calls]


async def test_the_template_gets_functions_calls_and_results(tools: Service) -> None:
    made = {"id": "call_1", "type": "function", "function": {"name": "cut", "arguments": '{"size": 3}'}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "content": "done", "tool_call_id": "call_1"},
    ]
    response = await tools.http.post("/tokenize", json={"messages": messages, "tools": TOOLS})
    text = tools.tokenizer.decode(response.json()["tokens"], skip_special_tokens=False)
    assert text.startswith("cut fold <tool_call>\ncut 3\n</tool_call><|im_start|>user\nhello<|im_end|>\n")
    assert "<|im_start|>tool\ndone<|im_end|>\n" in text


async def test_with_tool_choice_none_the_prompt_has_no_tools_and_calls_are_text(tools: Service) -> None:
    script(tools, TWO_CALLS, told="")
    (choice,) = (await tools.chat("hello", tools=TOOLS, tool_choice="none")).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": TWO_CALLS, "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_without_parallel_calls_only_the_first_call_is_kept(tools: Service) -> None:
    script(tools, TWO_CALLS)
    (choice,) = (await tools.chat("hello", tools=TOOLS, parallel_tool_calls=False)).json()["choices"]
    assert calls_of(choice["message"]) == [("cut", {"size": 1})]


async def test_a_call_that_the_limit_cuts_off_has_finish_reason_length(tools: Service) -> None:
    script(tools, call("cut", '{"size": 1}'))
    (choice,) = (await tools.chat("hello", tools=TOOLS, max_tokens=40)).json()["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert '{"size": 1}'.startswith(made["function"]["arguments"])
    assert choice["finish_reason"] == "length"


async def test_the_beginning_of_a_call_that_was_cut_off_is_never_content(tools: Service) -> None:
    script(tools, TWO_CALLS)
    length = len(tools.tokenizer.encode(TWO_CALLS))
    whole_arguments, told = ['{"size": 1}', '{"size": 2}'], []
    for max_tokens in range(1, length, 5):
        asked = {"tools": TOOLS, "max_tokens": max_tokens}
        (choice,) = (await tools.chat("hello", **asked)).json()["choices"]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        assert "Well.".startswith(message["content"] or "")
        assert all(full.startswith(call["arguments"]) for full, call in zip(whole_arguments, calls, strict=False))
        *chunks, _ = events((await tools.chat("hello", stream=True, **asked)).text)
        streamed = [chunk["choices"][0] for chunk in chunks]
        deltas = [each["delta"] for each in streamed]
        assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
        pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
        assert [piece["name"] for piece in pieces if "name" in piece] == [call["name"] for call in calls]
        assert "".join(piece["arguments"] for piece in pieces) == "".join(call["arguments"] for call in calls)
        assert choice["finish_reason"] == streamed[-1]["finish_reason"] == "length"
        told.append(len(calls))
    assert set(told) == {0, 1, 2}


FORCED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "required": ({"tool_choice": "required"}, {"cut", "fold"}),
    "required, one": ({"tool_choice": "required", "parallel_tool_calls": False}, {"cut", "fold"}),
    "named": ({"tool_choice": {"type": "function", "function": {"name": "fold"}}}, {"fold"}),
}


@pytest.mark.parametrize(("asked", "names"), FORCED.values(), ids=FORCED)
async def test_a_required_call_is_made_and_its_arguments_fit(
    tools: Service, asked: dict[str, Any], names: set[str]
) -> None:
    """Only the grammar makes the calls fit: the model writes random tokens."""
    num_ended = 0
    for seed in range(3):
        response = await tools.chat("hello", tools=TOOLS, seed=seed, max_tokens=200, **asked)
        (choice,) = response.json()["choices"]
        if choice["finish_reason"] == "length":  # the grammar does not limit the number of calls
            assert "parallel_tool_calls" not in asked
            continue
        num_ended += 1
        assert choice["finish_reason"] == "tool_calls"
        calls = calls_of(choice["message"])
        assert choice["message"]["content"] is None
        assert {name for name, _ in calls} <= names
        for _, arguments in calls:
            jsonschema.validate(arguments, SIZE)
        assert len(calls) == 1 or asked["tool_choice"] == "required"
    assert num_ended > 0


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_called(tools: Service, mode: str, endpoint: str) -> None:
    """The prompt has both functions; the model writes the beginning of a call, and then random tokens."""
    script(tools, "<tool_call>", end=False)
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": allowed(mode, "fold"), "parallel_tool_calls": False}
    if endpoint == "responses":
        functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
        choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "fold"}]}
        asked |= {"tools": functions, "tool_choice": choice, "input": "hello"}
    for seed in range(3):
        if endpoint == "responses":
            body = {"model": "tiny", "seed": seed, "max_output_tokens": 150, **asked}
            answer = (await tools.http.post("/v1/responses", json=body)).json()
            assert answer["tool_choice"] == asked["tool_choice"]
            (name,) = [item["name"] for item in answer["output"] if item["type"] == "function_call"]
        else:
            (choice,) = (await tools.chat("hello", seed=seed, max_tokens=150, **asked)).json()["choices"]
            (name,) = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
        assert name == "fold"


async def test_a_function_without_parameters_is_called_without_arguments(tools: Service) -> None:
    asked = {"tools": [PAINT], "tool_choice": PAINT, "max_tokens": 100}
    (choice,) = (await tools.chat("hello", **asked)).json()["choices"]
    assert calls_of(choice["message"]) == [("paint", {})]


async def test_arguments_of_strict_functions_fit_in_optional_calls(tools: Service) -> None:
    strict = [tool("cut", strict=True), PAINT]
    script(tools, 'Well. <tool_call>\n{"name": "cut", "arguments": {', told="cut paint ", end=False)
    for seed in range(3):
        asked = {"tools": strict, "seed": seed, "parallel_tool_calls": False, "max_tokens": 150}
        (choice,) = (await tools.chat("hello", **asked)).json()["choices"]
        ((name, arguments),) = calls_of(choice["message"])
        assert name == "cut"
        jsonschema.validate(arguments, SIZE)


async def test_a_model_that_writes_json_alone_makes_one_call(
    start: Callable[..., Service], model: ServedModel, tokenizer: Tokenizer, grammars: XGrammarBackend
) -> None:
    words = '{% if tools %}{% endif %}{# {"name": function name, "parameters": dictionary} #}'
    alone = Tokenizer(tokenizer.backend, {"eos_token": "<|im_end|>"}, ChatTemplate({"default": TEMPLATE + words}))
    service = start(Role.UNIFIED, served=replace(model, tokenizer=alone), grammars=grammars)
    for seed in range(3):
        asked = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "max_tokens": 100}
        (choice,) = (await service.chat("hello", **asked)).json()["choices"]
        ((_, arguments),) = calls_of(choice["message"])
        jsonschema.validate(arguments, SIZE)
    script(service, '{"name": "cut", "parameters": {"size": 2}}', told="")
    (choice,) = (await service.chat("hello", tools=TOOLS)).json()["choices"]
    assert calls_of(choice["message"]) == [("cut", {"size": 2})]
    script(service, '{"size": 2}', told="")
    (choice,) = (await service.chat("hello", tools=TOOLS)).json()["choices"]
    assert choice["message"]["content"] == '{"size": 2}'


SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "response_format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "size", "schema": SIZE}}},
        '{"size": ',
    ),
    "any object": ({"response_format": {"type": "json_object"}}, "{"),
    "choice": ({"structured_outputs": {"choice": ['{"size": 1}', '{"size": 2}']}}, '{"si'),
    "regex": ({"structured_outputs": {"regex": '\\{"size": [123]\\}'}}, '{"si'),
    "grammar": ({"structured_outputs": {"grammar": 'root ::= "{\\"size\\": " [123] "}"'}}, '{"si'),
}


@pytest.mark.parametrize(("asked", "begun"), SHAPES.values(), ids=SHAPES)
async def test_with_a_constraint_on_content_an_answer_is_fitting_content_or_calls(
    tools: Service, asked: dict[str, Any], begun: str
) -> None:
    """The model writes the beginning of content or of a call, and then random tokens."""
    call_begun = '<tool_call>\n{"name": "cut", "arguments": {'
    asked = {**asked, "tools": [tool("cut", strict=True), PAINT], "parallel_tool_calls": False, "max_tokens": 150}
    for seed in range(3):
        script(tools, begun, told="cut paint ", end=False)
        (choice,) = (await tools.chat("hello", seed=seed, **asked)).json()["choices"]
        assert "tool_calls" not in choice["message"]
        if choice["finish_reason"] != "length":  # the schema does not limit whitespace
            answer = json.loads(choice["message"]["content"])
            jsonschema.validate(answer, {"type": "object"} if begun == "{" else SIZE)
        script(tools, call_begun, told="cut paint ", end=False)
        (choice,) = (await tools.chat("hello", seed=seed, **asked)).json()["choices"]
        ((name, arguments),) = calls_of(choice["message"])
        assert (name, choice["finish_reason"], choice["message"]["content"]) == ("cut", "tool_calls", None)
        jsonschema.validate(arguments, SIZE)
        required = {**asked, "tool_choice": "required"}
        (choice,) = (await tools.chat("hello", seed=seed, **required)).json()["choices"]
        assert calls_of(choice["message"]), "with required calls, content must not be allowed"


@pytest.mark.slow
async def test_a_broken_stream_with_calls_can_be_resumed(start: Callable[..., Service], caller: ServedModel) -> None:
    body = {"tools": TOOLS, "stream": True, "stream_options": {"resumable": True}, "seed": 1}
    service = start(Role.UNIFIED, served=caller)
    script(service, TWO_CALLS)
    headers = {"x-request-id": "one"}
    message = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}

    async def told(**more: str) -> list[str]:
        response = await service.http.post("/v1/chat/completions", json=message | body, headers=headers | more)
        assert response.status_code == 200, response.text
        return response.text.split("\n\n")[:-1]

    whole = await told()
    named = [index for index, event in enumerate(whole) if event.startswith("id: ")]
    assert len(named) > 10
    for index in named:
        event_id = whole[index].partition("\n")[0].removeprefix("id: ")
        assert await told(**{"last-event-id": event_id}) == whole[index + 1 :]
