"""Answers in the official client's types can be sent back as an earlier turn, in every format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from ...helpers.gateway_service import Service
from ...helpers.reasoning_model import CUT, FOLD, HELLO, SIZE

pytestmark = pytest.mark.exhaustive

FORMS: dict[str, Callable[[Any], Any]] = {
    "the object": lambda kept: kept,
    "model_dump": lambda kept: kept.model_dump(),
    "model_dump for JSON": lambda kept: kept.model_dump(mode="json"),
    "to_dict": lambda kept: kept.to_dict(),
}
USER: Any = {"role": "user", "content": "hello"}


class Piece(BaseModel):
    size: Literal[1, 2, 3]


@dataclass(frozen=True)
class Turn:
    """A model's output and its rendering in the next prompt, in which `{0}` is the id of the first call."""

    written: str
    rendered: str
    chat: dict[str, Any] = field(default_factory=dict)  # fields of the request
    response: dict[str, Any] = field(default_factory=dict)
    told: str = ""


FUNCTIONS: list[dict[str, Any]] = [{"name": name, "parameters": SIZE, "strict": True} for name in ("cut", "fold")]
TURNS = {
    "words": Turn("the dog sleeps", "the dog sleeps"),
    "thoughts": Turn("<think>\nwho?\n</think>\n\nthe dog", "<think>who?</think>the dog"),
    "calls": Turn(
        f"<think>who?</think>Well.\n{CUT}\n{FOLD}",
        "<think>who?</think>Well.<tool_call>{0} cut 1</tool_call><tool_call>{1} fold 2</tool_call>",
        {"tools": [{"type": "function", "function": function} for function in FUNCTIONS]},
        {"tools": [{"type": "function", **function} for function in FUNCTIONS]},
        told="cut fold ",
    ),
    "parsed": Turn(
        '<think>who?</think>\n\n{"size": 1}',
        '<think>who?</think>{{"size": 1}}',
        {"response_format": Piece},
        {"text_format": Piece},
    ),
}


def script(service: Service, turn: Turn, calls: list[str]) -> None:
    """Script the turn, and the answer "cut" to a prompt that holds the whole turn."""
    returned = "".join("<|im_start|>tool\n1<|im_end|>\n" for _ in calls)
    earlier = f"{HELLO}{turn.rendered.format(*calls)}<|im_end|>\n{returned}"
    service.script(f"{earlier}{HELLO}", "cut")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TURNS)
async def test_the_message_of_a_chat_can_be_sent_back(responses: Service, name: str, form: str) -> None:
    turn = TURNS[name]
    responses.script(turn.told + HELLO, turn.written)
    async with responses.openai() as client:
        async with client.chat.completions.stream(model="tiny", messages=[USER], **turn.chat) as stream:
            message = (await stream.get_final_completion()).choices[0].message
        calls = [call.id for call in message.tool_calls or ()]
        returned = [{"role": "tool", "tool_call_id": call, "content": "1"} for call in calls]
        script(responses, turn, calls)
        told: Any = [USER, FORMS[form](message), *returned, USER]
        answer = await client.chat.completions.create(model="tiny", messages=told)
    assert answer.choices[0].message.content == "cut"


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TURNS)
async def test_the_items_of_a_response_can_be_sent_back(responses: Service, name: str, form: str) -> None:
    turn = TURNS[name]
    responses.script(turn.told + HELLO, turn.written)
    async with responses.openai() as client:
        async with client.responses.stream(model="tiny", input="hello", top_logprobs=1, **turn.response) as stream:
            output = (await stream.get_final_response()).output
        calls = [item.call_id for item in output if item.type == "function_call"]
        returned = [{"type": "function_call_output", "call_id": call, "output": "1"} for call in calls]
        script(responses, turn, calls)
        told: Any = [USER, *map(FORMS[form], output), *returned, USER]
        assert (await client.responses.create(model="tiny", input=told)).output_text == "cut"


CALL: dict[str, Any] = {"id": "a", "function": {"name": "cut", "arguments": "{}"}}


async def test_null_fields_are_ignored_even_if_they_are_unknown(service: Service) -> None:
    part = {"type": "text", "text": "x", "mood": None}
    call = {**CALL, "mood": None, "function": {**CALL["function"], "mood": None}}
    said = {"role": "assistant", "content": [part], "tool_calls": [call], "mood": None}
    body = {"model": "tiny", "max_tokens": 1, "messages": [USER, said]}
    assert (await service.http.post("/v1/chat/completions", json=body)).status_code == 200


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another field": ({"mood": "good"}, "mood"),
    "a call's": ({"tool_calls": [{**CALL, "mood": "good"}]}, "tool_calls[0].mood"),
    "an index": ({"tool_calls": [{**CALL, "index": "1"}]}, "tool_calls[0].index"),
    "a call that is null": ({"tool_calls": [None]}, "tool_calls[0]"),
    "a function that is null": ({"tool_calls": [{**CALL, "function": None}]}, "tool_calls[0].function"),
    "a role that is null": ({"role": None}, "role"),
    "a user's, parsed": ({"role": "user", "parsed": {"size": 1}}, "parsed"),
    "a refusal": ({"refusal": "no"}, "refusal"),
}


@pytest.mark.parametrize(("fields", "param"), WRONG.values(), ids=WRONG)
async def test_invalid_fields_of_earlier_turns_are_refused_by_name(
    service: Service, fields: dict[str, Any], param: str
) -> None:
    said = {"role": "assistant", "content": "x", **fields}
    body = {"model": "tiny", "messages": [USER, said]}
    response = await service.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"messages[1].{param}"
