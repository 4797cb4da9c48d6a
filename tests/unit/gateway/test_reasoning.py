"""Reasoning is a field of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from baton.cluster.cli.http_client import show_answer
from baton.cluster.contracts import Role
from baton.cluster.gateway.model import ServedModel
from baton.engine.structured import XGrammarBackend
from baton.engine.text import ChatTemplate, Tokenizer

from ...helpers.gateway_service import Service, events
from ...helpers.tiny_model import TEMPLATE

ANSWER = "<think>\nthe fox?\n</think>\n\nthe dog"
PROMPT = "<|im_start|>user\nwho sleeps?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
async def thinking(
    start: Callable[..., Service], model: ServedModel, tokenizer: Tokenizer, grammars: XGrammarBackend
) -> Service:
    template = ChatTemplate({"default": TEMPLATE + "{# it may open with <think> #}"})
    thinker = Tokenizer(tokenizer.backend, {"eos_token": "<|im_end|>"}, template)
    return start(Role.PREFILL, Role.DECODE, served=replace(model, tokenizer=thinker), grammars=grammars)


async def test_reasoning_and_content_are_two_fields(thinking: Service) -> None:
    thinking.script(PROMPT, ANSWER)
    (choice,) = (await thinking.chat("who sleeps?")).json()["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("the fox?", "the dog")
    assert choice["message"]["reasoning"] == "the fox?"


async def test_a_stream_sends_reasoning_first(thinking: Service) -> None:
    thinking.script(PROMPT, ANSWER)
    *chunks, _ = events((await thinking.chat("who sleeps?", stream=True)).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    kinds = [kind for delta in deltas for kind in ("reasoning_content", "content") if delta.get(kind)]
    assert kinds == sorted(kinds, reverse=True)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "the fox?"
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    assert "".join(delta.get("content", "") for delta in deltas) == "the dog"


async def test_a_prompt_may_have_opened_the_reasoning(thinking: Service) -> None:
    thinking.script(f"{PROMPT}<think>\n", "the fox?</think>the dog")
    asked = {"chat_template_kwargs": {"hint": "<think>\n"}}
    (choice,) = (await thinking.chat("who sleeps?", **asked)).json()["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("the fox?", "the dog")


async def test_a_call_may_follow_the_reasoning(
    start: Callable[..., Service], model: ServedModel, tokenizer: Tokenizer
) -> None:
    template = ChatTemplate(
        {"default": TEMPLATE + "{% if tools %}{% endif %}{# <think>, <tool_call> with arguments #}"}
    )
    thinker = Tokenizer(tokenizer.backend, {"eos_token": "<|im_end|>"}, template)
    service = start(Role.UNIFIED, served=replace(model, tokenizer=thinker))
    service.script(PROMPT, '<think>look</think>\n\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')
    tools = [{"type": "function", "function": {"name": "look"}}]
    (choice,) = (await service.chat("who sleeps?", tools=tools)).json()["choices"]
    assert choice["message"]["reasoning_content"] == "look"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}


OPENED = {"chat_template_kwargs": {"hint": "<think>"}}
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
    "json": ({"structured_outputs": {"json": {"const": 7}}}, "7"),
    "response_format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 7}}}},
        "7",
    ),
}


@pytest.mark.parametrize(("asked", "answer"), SHAPES.values(), ids=SHAPES)
async def test_a_model_may_reason_before_a_structured_output(
    thinking: Service, asked: dict[str, Any], answer: str
) -> None:
    """Only the grammar makes the answer fit: after its reasoning the model writes random tokens."""
    thinking.script(PROMPT, "<think>\nthe fox?\n</think>\n\n", end=False)
    thinking.script(PROMPT + "<think>", "\nthe fox?\n</think>\n\n", end=False)
    for opened in ({}, OPENED):
        (choice,) = (await thinking.chat("who sleeps?", **asked, **opened)).json()["choices"]
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("the fox?", answer)
        assert choice["finish_reason"] == "stop"
    thinking.script(PROMPT, answer[0], end=False)
    (choice,) = (await thinking.chat("who sleeps?", **asked)).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": answer, "refusal": None}, "reasoning must be optional"


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"json": {"const": 7}, "disable_any_whitespace": True}},
        {
            "structured_outputs": {
                "structural_tag": '{"type": "structural_tag", "format": {"type": "regex", "pattern": "7"}}'
            }
        },
    ],
    ids=["no whitespace", "tag"],
)
async def test_constraints_on_the_whole_output_leave_no_room_for_reasoning(
    thinking: Service, asked: dict[str, Any]
) -> None:
    (choice,) = (await thinking.chat("who sleeps?", **asked, **OPENED)).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "7", "refusal": None}


async def test_a_required_call_may_follow_reasoning(
    start: Callable[..., Service], model: ServedModel, tokenizer: Tokenizer, grammars: XGrammarBackend
) -> None:
    template = ChatTemplate(
        {"default": TEMPLATE + "{% if tools %}{% endif %}{# <think>, <tool_call> with arguments #}"}
    )
    thinker = Tokenizer(tokenizer.backend, {"eos_token": "<|im_end|>"}, template)
    service = start(Role.PREFILL, Role.DECODE, served=replace(model, tokenizer=thinker), grammars=grammars)
    service.script(PROMPT + "<think>", "look</think>\n\n", end=False)
    tools = [{"type": "function", "function": {"name": "look"}}]
    asked = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120, "seed": 1}
    (choice,) = (await service.chat("who sleeps?", **asked, **OPENED)).json()["choices"]
    assert choice["message"]["reasoning_content"] == "look"
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {})


async def test_an_answer_can_be_sent_back_with_its_reasoning(thinking: Service) -> None:
    thinking.script(PROMPT, ANSWER)
    (choice,) = (await thinking.chat("who sleeps?")).json()["choices"]
    messages = [{"role": "user", "content": "who sleeps?"}, choice["message"], {"role": "user", "content": "why?"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    assert (await thinking.http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_reasoning_is_read_from_either_field_and_both_must_be_equal(
    start: Callable[..., Service], thinker: ServedModel
) -> None:
    service = start(Role.UNIFIED, served=thinker)

    async def tokens(**thoughts: str) -> Any:
        body = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", **thoughts}]}
        return (await service.http.post("/tokenize", json=body)).json()

    told = await tokens(reasoning_content="the fox?")
    assert told["count"] > (await tokens())["count"]
    assert await tokens(reasoning="the fox?") == told
    assert await tokens(reasoning="the fox?", reasoning_content="the fox?") == told
    refused = await tokens(reasoning="the fox?", reasoning_content="the dog")
    assert refused["error"]["param"] == "messages[1].reasoning"


async def test_text_of_models_without_reasoning_stays_content(service: Service) -> None:
    service.script_chat("who sleeps?", ANSWER)
    (choice,) = (await service.chat("who sleeps?")).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}


def test_the_command_line_shows_reasoning_apart_and_sends_back_only_the_answer() -> None:
    console = Console(file=StringIO(), force_terminal=True, color_system="standard")
    deltas = [{"role": "assistant"}, {"reasoning_content": "the "}, {"reasoning_content": "fox?"}, {"content": "dog"}]
    assert show_answer(console, iter(deltas)) == "dog"
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.index("\x1b[2mfox?") < shown.index("\n\ndog")
