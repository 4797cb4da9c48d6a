"""vLLM's fields about a prompt's tokens: `return_token_ids` and `truncate_prompt_tokens`."""

from __future__ import annotations

from typing import Any

import pytest

from ...helpers.gateway_service import Service, check_refused, events

PROMPT = "the fox 🦊"
ANSWER = "the dog 🐕 sleeps"
BOTH = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


async def ask(service: Service, path: str, **fields: Any) -> Any:
    service.script(PROMPT, ANSWER)
    service.script_chat(PROMPT, ANSWER)
    fields = {"max_tokens": 64, **fields}
    response = await (service.chat if "chat" in path else service.complete)(PROMPT, **fields)
    assert response.status_code == 200, response.text
    return response


def prompt_of(service: Service, path: str) -> list[int]:
    chat = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    return service.tokenizer.encode(chat if "chat" in path else PROMPT)


@BOTH
@pytest.mark.parametrize("stop", [None, "dog"])
async def test_an_answer_has_the_ids_of_its_tokens(service: Service, path: str, stop: str | None) -> None:
    answer = (await ask(service, path, return_token_ids=True, stop=stop, n=2)).json()
    holders = [answer] if "chat" in path else answer["choices"]
    assert all(holder["prompt_token_ids"] == prompt_of(service, path) for holder in holders)
    tokens = [*service.tokenizer.encode(ANSWER), service.tokenizer.eos_token_id]
    for choice in answer["choices"]:
        told = choice["token_ids"]
        assert told == tokens if stop is None else told == tokens[: len(told)]
    assert sum(len(choice["token_ids"]) for choice in answer["choices"]) == answer["usage"]["completion_tokens"]


@BOTH
async def test_a_stream_has_the_prompt_once_and_each_token_once(service: Service, path: str) -> None:
    *chunks, _ = events((await ask(service, path, return_token_ids=True, stream=True)).text)
    holders = chunks if "chat" in path else [chunk["choices"][0] for chunk in chunks]
    assert [holder.get("prompt_token_ids") for holder in holders] == [
        prompt_of(service, path),
        *[None] * (len(holders) - 1),
    ]
    told = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert told == [*service.tokenizer.encode(ANSWER), service.tokenizer.eos_token_id]


@BOTH
async def test_ids_are_returned_only_on_request(service: Service, path: str) -> None:
    assert "token_ids" not in (await ask(service, path)).text
    assert "token_ids" not in (await ask(service, path, stream=True, return_token_ids=False)).text


async def test_ids_of_a_prompt_that_is_only_scored_have_no_answer(service: Service) -> None:
    answer = (await ask(service, "", return_token_ids=True, echo=True, logprobs=0, max_tokens=0)).json()
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([], prompt_of(service, ""))


async def test_too_many_ids_of_prompts_are_refused(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cluster.gateway.api.prepare.MAX_RETURNED_PROMPT_TOKENS", 59)
    response = await service.complete([[5] * 10, [6] * 10], n=3, return_token_ids=True)
    check_refused(response, 400, "return_token_ids", "too_many_values")
    assert (await service.complete([[5] * 10, [6] * 10], n=3)).status_code == 200


@BOTH
async def test_a_prompt_keeps_its_last_tokens(service: Service, path: str) -> None:
    answer = (await ask(service, path, truncate_prompt_tokens=3, return_token_ids=True)).json()
    holder = answer if "chat" in path else answer["choices"][0]
    assert holder["prompt_token_ids"] == prompt_of(service, path)[-3:]
    assert answer["usage"]["prompt_tokens"] == 3


@BOTH
async def test_minus_one_truncates_the_prompt_so_that_the_answer_fits(service: Service, path: str) -> None:
    long = "the fox jumps " * 2000
    ask_long = service.chat if "chat" in path else service.complete
    assert (await ask_long(long, max_tokens=6)).json()["error"]["code"] == "context_length_exceeded"
    answer = (await ask_long(long, max_tokens=6, truncate_prompt_tokens=-1)).json()
    assert answer["usage"]["prompt_tokens"] == 250
    unsaid = (await ask_long(long, truncate_prompt_tokens=-1)).json()
    assert unsaid["usage"]["total_tokens"] <= 256


async def test_each_prompt_is_truncated_and_echoed_truncated(service: Service) -> None:
    texts = ["the fox jumps over the dog", "the dog sleeps"]
    answer = (await service.complete(texts, truncate_prompt_tokens=2, echo=True, max_tokens=0, logprobs=0)).json()
    kept = [service.tokenizer.decode(service.tokenizer.encode(text)[-2:], False) for text in texts]
    assert [choice["text"] for choice in answer["choices"]] == kept


@BOTH
@pytest.mark.parametrize("wrong", [0, -2, 257, 1.5, "3", True])
async def test_other_lengths_are_refused(service: Service, path: str, wrong: Any) -> None:
    response = await (service.chat if "chat" in path else service.complete)("x", truncate_prompt_tokens=wrong)
    check_refused(response, 400, "truncate_prompt_tokens")
