"""HTTP apart from the bodies: methods, media types, paths, and CORS for web pages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable

import httpx
import pytest

from baton.cluster.contracts import Role

from ...helpers.gateway_service import Service

BODY = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 1}).encode()
PAGE = "https://chat.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


async def post(service: Service, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await service.http.post("/v1/completions", content=BODY, headers=named)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/health", "/live", "/metrics", "/tokenizer_info"])
async def test_routes_with_get_also_answer_head(service: Service, path: str) -> None:
    head = await service.http.head(path)
    whole = await service.http.get(path)
    assert head.status_code == whole.status_code == 200
    assert head.headers["content-type"] == whole.headers["content-type"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
async def test_json_is_accepted_under_each_of_its_media_types(service: Service, kind: str) -> None:
    assert (await post(service, content_type=kind)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_media_types_that_other_pages_can_send_without_a_preflight_are_refused(
    service: Service, path: str, kind: str
) -> None:
    answer = await service.http.post(path, content=BODY, headers={"content-type": kind})
    assert answer.status_code == 415
    assert kind.partition(";")[0] in answer.json()["error"]["message"]
    assert "application/json" in answer.json()["error"]["message"]


async def test_a_compressed_body_is_refused_by_name(service: Service) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = await service.http.post("/v1/completions", content=gzip.compress(BODY), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "gzip" in answer.json()["error"]["message"]
    assert answer.headers["accept-encoding"] == "identity"
    assert (await post(service, content_encoding="identity")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/models/", "/health/", "/tokenize/"])
async def test_a_trailing_slash_is_no_redirect(service: Service, path: str) -> None:
    """A redirect would name the scheme and host that the gateway sees, which behind a load balancer are wrong."""
    answer = await service.http.request("GET" if path in ("/v1/models/", "/health/") else "POST", path)
    assert answer.status_code == 404
    assert repr(path) in answer.json()["error"]["message"]


async def test_refusals_of_web_pages_name_the_setting(service: Service) -> None:
    answer = await service.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert answer.status_code == 405
    assert PAGE in answer.json()["error"]["message"]
    assert "gateway.allowed_origins" in answer.json()["error"]["message"]
    assert "access-control-allow-origin" not in (await post(service, origin=PAGE)).headers


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_pages_of_allowed_origins_may_call_and_read_even_refusals(
    start: Callable[..., Service], allowed: str
) -> None:
    service = start(Role.UNIFIED, allowed_origins=[allowed], api_keys=["secret"])
    leave = await service.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert leave.status_code == 200, "a browser sends no key with a preflight request"
    assert leave.headers["access-control-allow-origin"] == allowed
    assert "authorization" in leave.headers["access-control-allow-headers"]
    for key, status in (("secret", 200), ("wrong", 401)):
        answer = await post(service, origin=PAGE, authorization=f"Bearer {key}")
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == allowed
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_pages_of_other_origins_are_not_allowed(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, allowed_origins=["https://other.example"])
    leave = await service.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert leave.status_code == 400
    assert "access-control-allow-origin" not in leave.headers
    assert "access-control-allow-origin" not in (await post(service, origin=PAGE)).headers


async def test_tokenizer_info_has_the_fields_that_evaluations_need(service: Service) -> None:
    info = (await service.http.get("/tokenizer_info")).json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["bos_token"] is None
    assert "message.role" in info["chat_template"]
    assert info["model_max_length"] == 256
