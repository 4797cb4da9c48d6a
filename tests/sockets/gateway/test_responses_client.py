"""`/v1/responses` as the official client uses it: unchanged, over TCP."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from baton.cluster.contracts import Role

from ...helpers.gateway_service import Service
from ...helpers.reasoning_model import CUT, HELLO, TOOLS

ANSWER = "the 🦊 sleeps, and the lazy dog jumps over it"


class Piece(BaseModel):
    size: Literal[1, 2, 3]


@pytest.fixture
async def scripted(responses: Service) -> Service:
    responses.script(HELLO, f"<think>\nwho sleeps?\n</think>\n\n{ANSWER}")
    responses.script("cut fold " + HELLO, f"Well.\n{CUT}")
    return responses


async def test_a_streamed_response_equals_the_whole_one(scripted: Service) -> None:
    async with scripted.openai() as client:
        whole = await client.responses.create(model="tiny", input="hello", store=False)
        assert (whole.output_text, whole.status) == (ANSWER, "completed")
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        stream = await client.responses.create(model="tiny", input="hello", stream=True)
        events = [event async for event in stream]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
        assert (
            "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "who sleeps?"
        )
        assert events[-1].type == "response.completed"
        assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


async def test_the_tokens_of_a_prompt_are_counted_without_an_answer(scripted: Service) -> None:
    async with scripted.openai() as client:
        for asked in ({"input": "hello"}, {"input": "hello", "tools": TOOLS, "instructions": "be short"}):
            counted = await client.responses.input_tokens.count(**asked)
            answered = await client.responses.create(model="tiny", max_output_tokens=1, **asked)
            assert (counted.object, counted.input_tokens) == ("response.input_tokens", answered.usage.input_tokens)
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_tokens.count(model="other", input="hello")
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.input_tokens.count(input="hello", previous_response_id="resp_1")


async def test_the_clients_stream_assembles_the_items(scripted: Service) -> None:
    async with scripted.openai() as client:
        async with client.responses.stream(model="tiny", input="hello", tools=TOOLS) as stream:
            snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert snapshots[-1] == final.output_text == "Well."
        assert [item.type for item in final.output] == ["message", "function_call"]
        assert json.loads(final.output[1].arguments) == {"size": 1}


async def test_answers_are_parsed_to_the_requested_type(scripted: Service) -> None:
    scripted.script(HELLO.replace("hello", "how long?"), "<think>the fox?</think>\n\n", end=False)
    async with scripted.openai() as client:
        parsed = await client.responses.parse(model="tiny", input="how long?", text_format=Piece)
        assert isinstance(parsed.output_parsed, Piece)
        async with client.responses.stream(model="tiny", input="how long?", text_format=Piece) as stream:
            final = await stream.get_final_response()
        assert isinstance(final.output_parsed, Piece)
        told: Any = [{"role": "user", "content": "how long?"}, *parsed.output, {"role": "user", "content": "why?"}]
        assert (await client.responses.create(model="tiny", input=told, max_output_tokens=2)).status == "incomplete"


async def test_a_call_is_answered_by_sending_all_items_back(scripted: Service) -> None:
    async with scripted.openai() as client:
        told: Any = [{"role": "user", "content": "hello"}]
        first = await client.responses.create(model="tiny", input=told, tools=TOOLS)
        told += first.output
        (call,) = [item for item in first.output if item.type == "function_call"]
        told.append({"type": "function_call_output", "call_id": call.call_id, "output": "1"})
        turns = f"Well.<tool_call>{call.call_id} cut 1</tool_call><|im_end|>\n<|im_start|>tool\n1"
        scripted.script(f"cut fold {HELLO}{turns}<|im_end|>\n<|im_start|>assistant\n", "cut")
        assert (await client.responses.create(model="tiny", input=told, tools=TOOLS)).output_text == "cut"


async def test_headers_and_refusals_are_those_of_other_routes(scripted: Service) -> None:
    async with scripted.openai() as client:
        answer = await client.responses.with_raw_response.create(
            model="tiny", input="hello", extra_headers={"x-request-id": "abc"}
        )
        assert (answer.headers["x-request-id"], answer.parse().id) == ("abc", "resp_abc")
        assert answer.headers["x-baton-path"]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="tiny", input="hello", previous_response_id="resp_abc")
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "unsupported_parameter")
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.create(model="other", input="hello", stream=True)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_abc")


async def test_a_stream_that_fails_late_ends_with_a_failed_response(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, capacity_timeout_s=0.1)
    service.script(HELLO, ANSWER)
    service.cluster.members[0].die_after_tokens = 6
    async with service.openai() as client:
        stream = await client.responses.create(model="tiny", input="hello", stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message
    assert ANSWER.startswith(events[-1].response.output_text)
    assert events[-1].response.output_text
