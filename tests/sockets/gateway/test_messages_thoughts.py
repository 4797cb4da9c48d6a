"""Hidden reasoning in `/v1/messages`: `thinking.display: "omitted"`."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from baton.cluster.gateway.api.reasoning import opened_thoughts, sealed_thoughts

from ...helpers.gateway_service import Service
from ...helpers.reasoning_model import HELLO
from .anthropic_api import ask, block, names, put_together, stream, user, whole

ANSWER = "<think>\nthe fox and the 🦊?\n</think>\n\nWell."
THOUGHTS = "the fox and the 🦊?"
OMITTED: dict[str, Any] = {"thinking": {"type": "adaptive", "display": "omitted"}}


def told(thought: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a conversation whose answer begins with this block."""
    return [user(), {"role": "assistant", "content": [thought, {"type": "text", "text": "so"}]}, user("b")]


async def test_a_stream_has_the_signature_and_no_thinking_text(responses: Service) -> None:
    responses.script(HELLO, ANSWER)
    answer = await ask(responses, stream=True, **OMITTED)
    events = stream(answer)
    assert names(events) == [
        "message_start",
        *block("thinking_delta", "signature_delta"),
        *block("text_delta"),
        "message_delta",
        "message_stop",
    ]
    assert "fox" not in answer.text
    thoughts = [each["delta"] for each in events if each.get("delta", {}).get("type") == "thinking_delta"]
    assert thoughts == [{"type": "thinking_delta", "thinking": ""}]
    thought, text = put_together(events)["content"]
    assert (thought["thinking"], text["text"]) == ("", "Well.")
    assert opened_thoughts(thought["signature"]) == THOUGHTS


async def test_a_whole_answer_with_omitted_thinking_equals_the_stream(responses: Service) -> None:
    responses.script(HELLO, ANSWER)
    streamed = put_together(stream(await ask(responses, stream=True, **OMITTED)))
    message = whole(await ask(responses, **OMITTED))
    assert message["content"] == streamed["content"]
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


async def test_other_answers_show_their_thinking(responses: Service) -> None:
    responses.script(HELLO, ANSWER)
    for fields in ({}, {"thinking": {"type": "adaptive"}}, {"thinking": {"type": "adaptive", "display": "summarized"}}):
        thought = whole(await ask(responses, **fields))["content"][0]
        assert thought["thinking"] == THOUGHTS
        assert opened_thoughts(thought["signature"]) is None


async def test_thinking_that_is_sent_back_is_read_from_the_signature(responses: Service) -> None:
    async def num_tokens(thought: dict[str, Any]) -> int:
        body = {"model": "tiny", "messages": told(thought)}
        return int((await responses.http.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"])

    shown = {"type": "thinking", "thinking": THOUGHTS, "signature": "s"}
    for text in ("", "not these"):
        sealed = {"type": "thinking", "thinking": text, "signature": sealed_thoughts(THOUGHTS)}
        assert await num_tokens(sealed) == await num_tokens(shown) > await num_tokens(shown | {"thinking": "x"})
        prompt = f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>{THOUGHTS}</think>so<|im_end|>\n"
        responses.script(f"{prompt}<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n", "yes")
        assert whole(await ask(responses, told(sealed), max_tokens=20))["content"] == [{"type": "text", "text": "yes"}]


@pytest.mark.parametrize("signature", ["baton1.!", "baton1.aGk", "baton1._w==", "baton1.aGk=🦊"])
async def test_a_damaged_signature_is_refused_by_name(responses: Service, signature: str) -> None:
    answer = await ask(responses, told({"type": "thinking", "thinking": "", "signature": signature}))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[1].content[0].signature")
    assert "send thoughts back as they came" in error["message"]


async def test_signatures_of_other_servers_are_not_read(responses: Service) -> None:
    for signature in ("", "EosnCkYICxIMMb3LzNrMu", "baton2.x"):
        thought = {"type": "thinking", "thinking": "hm", "signature": signature}
        assert (await ask(responses, told(thought), max_tokens=1)).status_code == 200


async def test_the_official_client_can_send_the_signature_back(responses: Service) -> None:
    responses.script(HELLO, ANSWER)
    async with responses.over_tcp() as url, anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": [user()], **OMITTED}
        async with client.messages.stream(**asked) as answer:
            message = await answer.get_final_message()
        thought = message.content[0]
        assert isinstance(thought, anthropic.types.ThinkingBlock)
        assert (thought.thinking, opened_thoughts(thought.signature)) == ("", THOUGHTS)
        history: Any = [user(), {"role": "assistant", "content": message.content}, user("b")]
        await client.messages.create(**{**asked, "messages": history, "max_tokens": 1})
