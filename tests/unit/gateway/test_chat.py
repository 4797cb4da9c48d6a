"""`/v1/chat/completions` as its clients see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baton.cluster.contracts import Role
from baton.cluster.gateway.model import ServedModel

from ...helpers.gateway_service import Service, events


async def test_a_message_is_answered(service: Service) -> None:
    service.script_chat("who sleeps?", "the dog sleeps")
    response = await service.chat("who sleeps?")
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "the dog sleeps", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)


async def test_a_stream_opens_with_the_role_and_ends_with_done(service: Service) -> None:
    service.script_chat("who sleeps?", "the dog sleeps")
    response = await service.chat("who sleeps?", stream=True)
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == "the dog sleeps"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


async def test_each_choice_of_a_stream_opens_with_its_role(service: Service) -> None:
    response = await service.chat("hello", n=3, stream=True, max_tokens=4, seed=1)
    opened = [
        choice["index"]
        for chunk in events(response.text)[:-1]
        for choice in chunk["choices"]
        if choice["delta"].get("role") == "assistant"
    ]
    assert sorted(opened) == [0, 1, 2]


async def test_without_a_limit_an_answer_may_fill_the_context(service: Service) -> None:
    response = await service.chat("hello")
    usage = response.json()["usage"]
    assert usage["total_tokens"] == 256
    assert response.json()["choices"][0]["finish_reason"] == "length"


async def test_max_completion_tokens_limits_the_answer_and_so_does_its_old_name(service: Service) -> None:
    for name in ("max_completion_tokens", "max_tokens"):
        response = await service.chat("hello", **{name: 3})
        assert response.json()["usage"]["completion_tokens"] == 3


async def test_logprobs_have_bytes_and_the_requested_number_of_alternatives(service: Service) -> None:
    service.script_chat("hello", "fox 🦊")
    response = await service.chat("hello", logprobs=True, top_logprobs=3)
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "fox 🦊"
    assert [entry["logprob"] for entry in content] == [-0.25] * len(content)
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert set(content[0]["top_logprobs"][0]) == {"token", "logprob", "bytes"}
    bare = await service.chat("hello", logprobs=True)
    assert all(entry["top_logprobs"] == [] for entry in bare.json()["choices"][0]["logprobs"]["content"])


async def test_content_may_come_in_parts_and_roles_reach_the_template(service: Service) -> None:
    made = {"id": "call_1", "type": "function", "function": {"name": "count", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "refusal": None, "annotations": [], "tool_calls": [made]},
        {"role": "tool", "content": "four", "tool_call_id": "call_1"},
    ]
    response = await service.http.post("/tokenize", json={"messages": messages})
    text = service.tokenizer.decode(response.json()["tokens"], skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nthree<|im_end|>\n<|im_start|>tool\nfour<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_template_variables_and_the_open_last_message_change_the_prompt(service: Service) -> None:
    async def prompt(**fields: Any) -> str:
        body = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "we"}], **fields}
        tokens = (await service.http.post("/tokenize", json=body)).json()["tokens"]
        return service.tokenizer.decode(tokens, skip_special_tokens=False)

    assert (await prompt(chat_template_kwargs={"hint": "well,"})).endswith("<|im_start|>assistant\nwell,")
    assert (await prompt(add_generation_prompt=False)).endswith("we<|im_end|>\n")
    open_ended = await prompt(add_generation_prompt=False, continue_final_message=True)
    assert open_ended.endswith("<|im_start|>assistant\nwe")


async def test_the_checkpoints_sampling_is_the_default(start: Callable[..., Service], model: ServedModel) -> None:
    served = replace(model, generation_defaults={"temperature": 0.6, "top_p": 0.95, "top_k": 20})
    service = start(Role.UNIFIED, served=served)
    await service.chat("hello", top_p=0.5, max_tokens=1)
    (request,) = service.cluster.members[0].submitted
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.6, 0.5, 20)


async def test_accepted_fields_without_effect_change_nothing(service: Service) -> None:
    service.script_chat("hello", "the dog")
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "stop": None,
        "n": None,
        "logit_bias": None,
        "modalities": ["text"],
    }
    response = await service.chat("hello", **harmless)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "the dog"
