"""LiteLLM as a client of `/v1/chat/completions` and `/v1/messages`, also through its bridge between the two."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.engine.text import Chat

from ...helpers.gateway_service import Service
from ...helpers.reasoning_model import CUT, HELLO, SIZE

pytestmark = pytest.mark.slow  # importing LiteLLM takes seconds

ANSWER = "the 🦊 sleeps, and the lazy dog jumps over it"
ASKED: Any = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100, "api_key": "none"}
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SIZE}} for name in ("cut", "fold")
]
MESSAGE_TOOLS: Any = [{"name": name, "description": "d", "input_schema": SIZE} for name in ("cut", "fold")]
ROUTES = ["hosted_vllm", "openai", "anthropic"]  # LiteLLM's names of servers; the last one asks /v1/messages


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise its import downloads prices
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # its import sets it
    import litellm

    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    monkeypatch.setattr(litellm, "num_retries", 0)
    return litellm


@pytest.fixture
async def url(responses: Service) -> AsyncIterator[str]:
    responses.script(HELLO, f"<think>\nwho sleeps?\n</think>\n\n{ANSWER}")
    responses.script("cut fold " + HELLO, f"Well.\n{CUT}")
    async with responses.over_tcp() as url:
        yield url


def at(url: str, route: str, model: str = "tiny") -> dict[str, Any]:
    return {"model": f"{route}/{model}", "api_base": url if route == "anthropic" else f"{url}/v1"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("route", ROUTES)
async def test_a_streamed_answer_equals_the_whole_one(litellm: Any, url: str, route: str) -> None:
    whole = await litellm.acompletion(**at(url, route), **ASKED)
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content) == (ANSWER, "who sleeps?")
    assert whole.choices[0].finish_reason == "stop"
    stream = await litellm.acompletion(**at(url, route), **ASKED, stream=True, stream_options={"include_usage": True})
    parts = [part async for part in stream]
    told = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
    assert told == ANSWER
    assert len([part for part in parts if part.choices and part.choices[0].delta.content]) > 3
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("route", ROUTES)
async def test_a_call_is_answered_with_the_result_that_was_sent_back(
    litellm: Any, url: str, route: str, responses: Service
) -> None:
    asked = ASKED | {"tools": CHAT_TOOLS}
    message = (await litellm.acompletion(**at(url, route), **asked)).choices[0].message
    call = message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("cut", {"size": 1})
    sent: list[str] = []
    watched = responses.tokenizer.render_chat

    def render(chat: Chat) -> str:
        sent.append(watched(chat))
        return sent[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(responses.tokenizer), "render_chat", lambda self, chat: render(chat))
        result = {"role": "tool", "tool_call_id": call.id, "content": "it is cut"}
        told = [*ASKED["messages"], message.model_dump(), result]
        answer = await litellm.acompletion(**at(url, route), **(asked | {"messages": told, "max_tokens": 4}))
    assert answer.usage.completion_tokens == 4
    assert f"{call.id} cut 1</tool_call>" in sent[0]
    assert "<|im_start|>tool\nit is cut<|im_end|>" in sent[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("route", ["hosted_vllm", "anthropic"])
async def test_anthropics_messages_over_either_route(litellm: Any, url: str, route: str) -> None:
    """With `hosted_vllm`, LiteLLM converts the message to a chat, and the answer back."""
    asked = ASKED | {"tools": MESSAGE_TOOLS}
    whole = await litellm.anthropic.messages.acreate(**at(url, route), **asked)
    blocks = [block for block in whole["content"] if block["type"] != "thinking"]
    assert [block["type"] for block in blocks] == ["text", "tool_use"]
    assert blocks[0]["text"].strip() == "Well."
    assert (blocks[1]["name"], blocks[1]["input"]) == ("cut", {"size": 1})
    assert whole["stop_reason"] == "tool_use"
    if route == "anthropic":
        return  # such a stream needs the packages of LiteLLM's proxy; `acompletion` streams this route above
    stream = await litellm.anthropic.messages.acreate(**at(url, route), **ASKED, stream=True)
    told = b"".join([part if isinstance(part, bytes) else str(part).encode() async for part in stream]).decode()
    assert told.index("message_start") < told.index("content_block_delta") < told.index("message_stop")
    data = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: ")]
    texts = [each["delta"].get("text", "") for each in data if each["type"] == "content_block_delta"]
    assert "".join(texts) == ANSWER


@pytest.mark.exhaustive
@pytest.mark.parametrize("route", ROUTES)
async def test_refusals_are_the_errors_of_their_status(litellm: Any, url: str, route: str) -> None:
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        await litellm.acompletion(**at(url, route, "other"), **ASKED)
    with pytest.raises(litellm.BadRequestError, match="context length"):
        await litellm.acompletion(**at(url, route), **(ASKED | {"max_tokens": 1000}))
