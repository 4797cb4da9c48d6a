"""The official client, unchanged, over TCP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from baton.cluster.contracts import Role

from ...helpers.gateway_service import Service

HELLO = [{"role": "user", "content": "who sleeps?"}]
ANSWER = "the 🦊 sleeps, and the lazy dog jumps over it"


@pytest.fixture
async def scripted(service: Service) -> Service:
    service.script_chat("who sleeps?", ANSWER)
    service.script("who sleeps?", ANSWER)
    return service


async def test_chats_are_answered_whole_and_streamed(scripted: Service) -> None:
    async with scripted.openai() as client:
        whole = await client.chat.completions.create(model="tiny", messages=HELLO)
        assert whole.choices[0].message.content == ANSWER
        assert whole.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_a_prediction_is_accepted_and_usage_counts_it(scripted: Service) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": HELLO, "prediction": {"type": "content", "content": ANSWER}}
    async with scripted.openai() as client:
        whole = await client.chat.completions.create(**fields)
        stream = await client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
        *_, last = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == ANSWER
    for usage in (whole.usage, last.usage):
        details = usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0), "no engine drafts"


async def test_completions_are_answered_whole_and_streamed(scripted: Service) -> None:
    async with scripted.openai() as client:
        fields = {"model": "tiny", "prompt": "who sleeps?", "max_tokens": 60}
        whole = await client.completions.create(**fields, logprobs=2)
        assert whole.choices[0].text == ANSWER
        assert whole.choices[0].logprobs.tokens[0] == "the"
        chunks = [chunk async for chunk in await client.completions.create(**fields, stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER


async def test_the_client_reads_logprobs_models_and_headers(scripted: Service) -> None:
    async with scripted.openai() as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        answer = await client.chat.completions.with_raw_response.create(
            model="tiny", messages=HELLO, logprobs=True, top_logprobs=2, extra_headers={"x-request-id": "abc"}
        )
        assert answer.headers["x-request-id"] == "abc"
        assert answer.headers["x-baton-path"]
        content = answer.parse().choices[0].logprobs.content
        assert bytes(byte for entry in content for byte in entry.bytes).decode() == ANSWER


async def test_errors_are_the_clients_own_exceptions(scripted: Service) -> None:
    async with scripted.openai() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=HELLO, temperature=200)
        assert (refused.value.param, refused.value.status_code) == ("temperature", 400)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="tiny", prompt=[5] * 300)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="other", prompt="x", stream=True)
        assert missing.value.code == "model_not_found"


async def test_a_wrong_key_is_an_authentication_error(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, api_keys=["right"])
    async with service.openai() as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        assert await client.with_options(api_key="right").models.list()


async def test_a_stream_that_fails_late_raises_after_its_last_token(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, capacity_timeout_s=0.1)
    service.script("who sleeps?", ANSWER)
    service.cluster.members[0].die_after_tokens = 6
    pieces: list[str] = []

    async def read(stream: Any) -> None:
        async for chunk in stream:
            pieces.append(chunk.choices[0].text)

    async with service.openai() as client:
        stream = await client.completions.create(model="tiny", prompt="who sleeps?", max_tokens=60, stream=True)
        with pytest.raises(openai.APIError) as failed:
            await read(stream)
    assert ANSWER.startswith("".join(pieces))
    assert pieces
    assert failed.value.code == "no_capacity"


async def test_the_first_token_does_not_wait_for_the_transfer(disaggregated: Service) -> None:
    disaggregated.script("who sleeps?", ANSWER)
    disaggregated.cluster.wire.hold = True
    async with disaggregated.openai() as client, asyncio.timeout(30):
        stream = await client.completions.create(model="tiny", prompt="who sleeps?", max_tokens=60, stream=True)
        first = await anext(stream)
        assert first.choices[0].text == "the"
        disaggregated.cluster.wire.hold = False
        rest = [chunk.choices[0].text async for chunk in stream]
    assert "the" + "".join(rest) == ANSWER


async def test_many_streams_at_once_do_not_mix(disaggregated: Service) -> None:
    answers = {f"question {i}": f"the fox number {i} jumps over dog {i * 7}" for i in range(32)}
    for prompt, answer in answers.items():
        disaggregated.script(prompt, answer)

    async with disaggregated.openai() as client:

        async def ask(prompt: str) -> str:
            stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=60, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*map(ask, answers))
    assert texts == list(answers.values())
    await disaggregated.cluster.settled()
