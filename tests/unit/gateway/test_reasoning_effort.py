"""`reasoning_effort` reaches the model by the variables of its chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.model import ServedModel
from baton.engine.text import ChatTemplate, Tokenizer

from ...helpers.gateway_service import Service
from ...helpers.tiny_model import TEMPLATE

EFFORTS = "{{ 'think ' + (reasoning_effort if reasoning_effort is defined else 'medium') }}"
SWITCH = "{{ 'off' if enable_thinking is defined and not enable_thinking else 'on' }}"


@pytest.fixture
def served(start: Callable[..., Service], model: ServedModel, tokenizer: Tokenizer) -> Callable[[str], Service]:
    """Return a function that starts a service of a model whose template has this ending."""

    def serve(ending: str) -> Service:
        template = ChatTemplate({"default": TEMPLATE + ending})
        taught = Tokenizer(tokenizer.backend, {"eos_token": "<|im_end|>"}, template)
        return start(Role.UNIFIED, served=replace(model, tokenizer=taught))

    return serve


async def prompt_of(service: Service, **fields: Any) -> str:
    messages = [{"role": "user", "content": "who?"}]
    tokens = (await service.http.post("/tokenize", json={"messages": messages, **fields})).json()["tokens"]
    chat = await service.chat("who?", max_tokens=1, **fields)
    assert chat.status_code == 200, chat.text
    assert chat.json()["usage"]["prompt_tokens"] == len(tokens)
    return service.tokenizer.decode(tokens, skip_special_tokens=False)


async def test_a_template_with_efforts_gets_the_effort(served: Callable[[str], Service]) -> None:
    service = served(EFFORTS)
    assert (await prompt_of(service)).endswith("think medium")
    for effort in ("none", "low", "high"):
        assert (await prompt_of(service, reasoning_effort=effort)).endswith(f"think {effort}")
    given = {"chat_template_kwargs": {"reasoning_effort": "as I say"}}
    assert (await prompt_of(service, reasoning_effort="low", **given)).endswith("think as I say")


async def test_effort_none_disables_thinking_in_a_template_with_a_switch(served: Callable[[str], Service]) -> None:
    service = served(SWITCH)
    assert (await prompt_of(service)).endswith("on")
    assert (await prompt_of(service, reasoning_effort="none")).endswith("off")


@pytest.mark.parametrize("ending", [SWITCH, ""], ids=["a switch", "nothing"])
async def test_an_effort_that_the_template_would_ignore_is_refused(
    served: Callable[[str], Service], ending: str
) -> None:
    answer = await served(ending).chat("who?", reasoning_effort="high")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("reasoning_effort", "unsupported_parameter")
    assert "'high'" in error["message"]


async def test_only_chats_have_efforts_and_only_openais(service: Service) -> None:
    assert (await service.complete("who?", reasoning_effort="low")).json()["error"]["param"] == "reasoning_effort"
    assert (await service.complete("who?", reasoning_effort="none")).status_code == 200
    assert (await service.chat("who?", reasoning_effort="much")).json()["error"]["param"] == "reasoning_effort"
