"""`/v1/messages` as Anthropic's official client uses it: unchanged, over TCP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest

from baton.cluster.contracts import Role

from ...helpers.gateway_service import Service
from ...helpers.reasoning_model import CUT, HELLO, SIZE

ANSWER = "the 🦊 sleeps, and the lazy dog jumps over it"
TOOLS: Any = [{"name": name, "description": "d", "input_schema": SIZE} for name in ("cut", "fold")]
ASKED: Any = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def client_of(service: Service, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        service.over_tcp() as url,
        anthropic.AsyncAnthropic(base_url=url, max_retries=0, timeout=20, **({"api_key": "k"} | options)) as client,
    ):
        yield client


@pytest.fixture
async def scripted(responses: Service) -> Service:
    responses.script(HELLO, f"<think>\nwho sleeps?\n</think>\n\n{ANSWER}")
    responses.script("cut fold " + HELLO, f"Well.\n{CUT}")
    return responses


async def test_a_streamed_message_equals_the_whole_one(scripted: Service) -> None:
    async with client_of(scripted) as client:
        whole = await client.messages.create(**ASKED)
        thought, text = whole.content
        assert isinstance(thought, anthropic.types.ThinkingBlock)
        assert isinstance(text, anthropic.types.TextBlock)
        assert (thought.thinking, text.text, whole.stop_reason) == ("who sleeps?", ANSWER, "end_turn")
        async with client.messages.stream(**ASKED) as stream:
            words = [word async for word in stream.text_stream]
            final = await stream.get_final_message()
        assert "".join(words) == ANSWER
        assert len(words) > 3
        assert final.content[0].model_dump() == thought.model_dump()
        assert final.stop_reason == "end_turn"
        assert final.usage.output_tokens == whole.usage.output_tokens
        raw = await client.messages.create(**ASKED, stream=True)
        kinds = [event.type async for event in raw]
        assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])


async def test_a_call_is_answered_by_sending_all_blocks_back(scripted: Service) -> None:
    async with client_of(scripted) as client:
        async with client.messages.stream(**ASKED, tools=TOOLS) as stream:
            first = await stream.get_final_message()
        assert first.stop_reason == "tool_use"
        _, call = first.content
        assert isinstance(call, anthropic.types.ToolUseBlock)
        assert (call.name, call.input) == ("cut", {"size": 1})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "1"}]}
        told: Any = [
            *ASKED["messages"],
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        turns = f"Well.<tool_call>{call.id} cut 1</tool_call><|im_end|>\n<|im_start|>tool\n1<|im_end|>\n"
        prompt = f"cut fold {HELLO}{turns}<|im_start|>assistant\n"
        scripted.script(prompt, "cut")
        second = await client.messages.create(**{**ASKED, "messages": told}, tools=TOOLS)
        assert [block.to_dict() for block in second.content] == [{"type": "text", "text": "cut"}]
        counted = await client.messages.count_tokens(model="tiny", messages=told, tools=TOOLS)
        assert counted.input_tokens == len(scripted.tokenizer.encode(prompt))
        used = second.usage
        assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


async def test_thinking_blocks_can_be_sent_back_unchanged(scripted: Service) -> None:
    async with client_of(scripted) as client:
        first = await client.messages.create(**ASKED)
        told: Any = [*ASKED["messages"], first.to_param(), {"role": "user", "content": "why?"}]
        thought = f"<think>who sleeps?</think>{ANSWER}"
        scripted.script(f"{HELLO}{thought}<|im_end|>\n{HELLO.replace('hello', 'why?')}", "so")
        second = await client.messages.create(**{**ASKED, "messages": told}, thinking={"type": "adaptive"})
        assert [block.to_dict() for block in second.content] == [{"type": "text", "text": "so"}]


async def test_a_stop_sequence_ends_a_message_and_is_named(scripted: Service) -> None:
    async with client_of(scripted) as client:
        answer = await client.messages.create(**ASKED, stop_sequences=[" and"])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " and")


async def test_refusals_are_the_clients_own_errors(scripted: Service) -> None:
    async with client_of(scripted) as client:
        image = {"type": "image", "source": {"type": "url", "url": "x"}}
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": [image]}]})
        assert (refused.value.type, refused.value.status_code) == ("invalid_request_error", 400)
        assert "'messages[0].content[0].type'" in str(refused.value)
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**{**ASKED, "model": "other"}, extra_headers={"x-request-id": "abc"})
        assert (missing.value.type, missing.value.request_id) == ("not_found_error", "abc")
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(model="other", messages=ASKED["messages"])
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.list()


@pytest.mark.parametrize("way", ["api_key", "auth_token"])
async def test_keys_are_read_from_both_headers(start: Callable[..., Service], way: str) -> None:
    service = start(Role.UNIFIED, api_keys=["right"])
    async with client_of(service, **{"api_key": None, way: "right"}) as client:
        assert (await client.messages.create(**{**ASKED, "max_tokens": 2})).stop_reason == "max_tokens"
    async with client_of(service, **{"api_key": None, way: "wrong"}) as client:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await client.messages.create(**ASKED)
        assert refused.value.type == "authentication_error"
        assert "x-api-key" in str(refused.value)


async def test_overload_and_large_bodies_have_anthropics_error_types(start: Callable[..., Service]) -> None:
    async with client_of(start(capacity_timeout_s=0.05)) as client:
        with pytest.raises(anthropic.InternalServerError) as overloaded:
            await client.messages.create(**ASKED)
        assert (overloaded.value.status_code, overloaded.value.type) == (503, "overloaded_error")
    async with client_of(start(Role.UNIFIED, max_body_bytes=1024)) as client:
        with pytest.raises(anthropic.APIStatusError) as large:
            await client.messages.create(**{**ASKED, "system": "x" * 2000})
        assert (large.value.status_code, large.value.type) == (413, "request_too_large")


async def test_a_stream_that_fails_late_ends_with_an_error(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, capacity_timeout_s=0.1)
    service.script(HELLO, ANSWER)
    service.cluster.members[0].die_after_tokens = 6
    words: list[str] = []

    async def read(client: anthropic.AsyncAnthropic) -> None:
        async with client.messages.stream(**ASKED) as stream:
            async for word in stream.text_stream:
                words.append(word)

    async with client_of(service) as client:
        with pytest.raises(anthropic.APIStatusError) as failed:
            await read(client)
    assert failed.value.type == "overloaded_error"
    assert words
    assert ANSWER.startswith("".join(words))
