"""Refusals of bodies before they are parsed as requests: broken JSON, sizes, unknown models and routes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from baton.cluster.contracts import Role

from ...helpers.gateway_service import Service, check_refused
from .refusals import BOTH, CHAT, COMPLETIONS, HUGE, check_alive

pytestmark = pytest.mark.exhaustive


@pytest.fixture
async def service(start: Callable[..., Service]) -> Service:
    return start(Role.UNIFIED, max_body_bytes=200_000, max_choices=8)


BROKEN = [
    b"",
    b"{",
    b"[]",
    b"3",
    b"null",
    b'"text"',
    b'{"model": "tiny", "prompt": "hello",}',
    b'{"model": "tiny", "prompt": "hello"} trailing',
    b"\xff\xfe{}",
    '{"model": "tiny"}'.encode("utf-16"),
    b'{"model": "tiny", "prompt": "\xff"}',
    b'{"model": "tiny", "prompt": "hello", "n": ' + b"9" * 5000 + b"}",
    b'{"model": "tiny", "prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    b'{"model": "tiny", "metadata": ' + b'{"a":' * 30_000 + b"1" + b"}" * 30_000 + b"}",
]


@pytest.mark.parametrize("body", BROKEN, ids=lambda body: repr(body)[:40])
async def test_broken_json_is_refused(service: Service, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize"):
        check_refused(await service.http.post(path, content=body), 400, None, "invalid_json")
    await check_alive(service)


async def test_a_key_given_twice_is_named(service: Service) -> None:
    body = b'{"model": "tiny", "prompt": "hello", "seed": 1, "seed": 2}'
    check_refused(await service.http.post(COMPLETIONS, content=body), 400, "seed", "invalid_json")


async def test_escaped_pairs_of_surrogates_are_text(service: Service) -> None:
    body = b'{"model": "tiny", "prompt": "\\ud83e\\udd8a", "max_tokens": 1, "echo": true}'
    response = await service.http.post(COMPLETIONS, content=body)
    assert response.json()["choices"][0]["text"].startswith("🦊")


async def test_more_messages_than_the_context_has_tokens_are_refused_unrendered(service: Service) -> None:
    messages = [{"role": "user", "content": ""}] * 257
    response = await service.http.post(CHAT, json={"model": "tiny", "messages": messages})
    check_refused(response, 400, "messages", "context_length_exceeded")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("prompt", {"prompt": "fox " * 2_500_000}),
        ("prompt", {"prompt": [1234567] * 1_000_000}),
        ("allowed_token_ids", {"prompt": "hello", "allowed_token_ids": [1234567] * 1_000_000}),
    ],
    ids=["text", "token ids", "a list in another field"],
)
async def test_ten_megabytes_within_the_default_limit_are_refused_by_field(
    start: Callable[..., Service], field: str, body: dict[str, Any]
) -> None:
    service = start(Role.UNIFIED)
    content = json.dumps({"model": "tiny", **body}).encode()
    assert len(content) > 8_000_000
    check_refused(await service.http.post(COMPLETIONS, content=content, timeout=60), 400, field)
    await check_alive(service)


@pytest.mark.parametrize(("memory_bytes", "limit_bytes"), [(400_000, 100_000), (100_000, 65_536), (50_000, 50_000)])
async def test_a_body_that_no_free_memory_would_hold_is_refused_for_good(
    start: Callable[..., Service], memory_bytes: int, limit_bytes: int
) -> None:
    """A 503 would make clients try again for ever."""
    service = start(Role.UNIFIED, request_memory_bytes=memory_bytes)
    body = b'{"model":"tiny","max_tokens":1,"prompt":"hello"}'
    for size, status in ((limit_bytes, 200), (limit_bytes + 1, 413)):
        answer = await service.http.post("/v1/completions", content=body.rjust(size))
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == "body_too_large"
    assert f"limit of {limit_bytes} bytes" in answer.json()["error"]["message"]


async def test_a_body_over_the_limit_is_refused_unread(service: Service) -> None:
    pulled = 0

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            nonlocal pulled
            while True:
                pulled += 1
                yield b" " * 10_000

    response = await service.complete("x" * 10_000_000)
    check_refused(response, 413, None, "body_too_large")
    response = await service.http.post(COMPLETIONS, content=Endless())
    check_refused(response, 413, None, "body_too_large")
    assert pulled < 30
    await check_alive(service)


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_an_unknown_model_is_not_found(service: Service, path: str, body: Any) -> None:
    response = await service.http.post(path, json={"model": "gpt-4", **body})
    message = check_refused(response, 404, "model", "model_not_found")
    assert "gpt-4" in message
    assert "tiny" in message
    check_refused(await service.http.post(path, json=body), 400, "model")
    check_refused(await service.http.post(path, json={"model": 3, **body}), 400, "model")
    check_refused(await service.http.get("/v1/models/gpt-4"), 404, "model", "model_not_found")


async def test_wrong_methods_and_paths_have_the_same_shape(service: Service) -> None:
    assert "allowed: POST" in check_refused(await service.http.get(COMPLETIONS), 405, None)
    assert "allowed: GET, HEAD" in check_refused(await service.http.delete("/v1/models"), 405, None)
    message = check_refused(await service.http.post("/v1/embeddings", json={}), 404, None)
    assert "'/v1/embeddings'" in message
    assert "/v1/chat/completions" in message
    check_refused(await service.http.get("/v1"), 404, None)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "mode": 1}, "mode"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [HUGE]}, "tokens"),
    ],
)
async def test_refusals_of_the_token_routes_name_the_field(service: Service, path: str, body: Any, param: str) -> None:
    check_refused(await service.http.post(path, json=body), 400, param)


async def test_template_variables_of_the_deepest_allowed_nesting_are_harmless(service: Service) -> None:
    value: Any = 1
    for _ in range(400):
        value = {"a": value}
    response = await service.chat("hello", max_tokens=1, chat_template_kwargs={"k": value})
    assert response.status_code in (200, 400)
    await check_alive(service)
