"""Routes for operators: health, ranks, metrics, keys, limits; and the small routes beside generation."""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
import threading
from collections.abc import Callable

import msgspec
import pytest

from baton.cluster.contracts import ClientCounters, Role
from baton.engine.text import Tokenizer
from baton.kv_transfer.protocol.stats import PeerLane, TransferStats

from ...helpers.gateway_service import Service


async def test_models_are_listed_and_looked_up(service: Service) -> None:
    listed = (await service.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)
    assert (await service.http.get("/v1/models/tiny")).json() == card


async def test_text_and_tokens_convert_both_ways(service: Service) -> None:
    text = "the 🦊 jumps"
    answer = (await service.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["tokens"] == service.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 256
    back = await service.http.post("/detokenize", json={"tokens": answer["tokens"], "model": "tiny"})
    assert back.json() == {"prompt": text}


async def test_the_gateway_is_live_from_the_start_and_ready_once_a_path_exists(start: Callable[..., Service]) -> None:
    service = start()
    assert (await service.http.get("/live")).status_code == 200
    response = await service.http.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_capacity"
    service.cluster.start(Role.PREFILL)
    assert (await service.http.get("/health")).status_code == 503
    service.cluster.start(Role.DECODE)
    assert (await service.http.get("/health")).status_code == 200


async def test_ping_says_what_health_says(start: Callable[..., Service]) -> None:
    service = start()
    for method in ("GET", "POST"):
        assert (await service.http.request(method, "/ping")).status_code == 503
    service.cluster.start(Role.UNIFIED)
    for method in ("GET", "POST"):
        assert (await service.http.request(method, "/ping")).json() == {"status": "ready", "engines": 1}


async def test_the_server_states_its_version_and_model(disaggregated: Service) -> None:
    disaggregated.cluster.start(Role.DECODE)
    version = importlib.metadata.version("baton")
    assert (await disaggregated.http.get("/version")).json() == {"version": version}
    assert (await disaggregated.http.get("/server_info")).json() == {
        "model": "tiny",
        "max_model_len": 256,
        "version": version,
        "load_balancing": "internal",
        "engines": {"prefill": 1, "decode": 2},
        "apis": ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"],
        "is_admin": False,
    }


async def test_the_load_is_the_number_of_requests_in_progress(start: Callable[..., Service]) -> None:
    service = start(capacity_timeout_s=20.0)
    waiting = asyncio.create_task(service.complete("hello", max_tokens=1))

    async def load() -> int:
        return (await service.http.get("/load")).json()["server_load"]

    async with asyncio.timeout(20):
        while await load() != 1:
            await asyncio.sleep(0.001)
    service.cluster.start(Role.UNIFIED)
    assert (await waiting).status_code == 200
    assert await load() == 0


async def test_ranks_show_every_engine(disaggregated: Service) -> None:
    ranks = (await disaggregated.http.get("/v1/cluster/ranks")).json()["data"]
    assert [(rank["rank"], rank["role"], rank["engine_id"]) for rank in ranks] == [
        (0, "prefill", "prefill-0"),
        (1, "decode", "decode-1"),
    ]
    assert ranks[0]["stats"]["num_blocks"] == 64


async def test_a_sane_request_id_is_echoed_and_any_other_replaced(service: Service) -> None:
    sane = "trace-1.2:3_x"
    response = await service.http.get("/live", headers={"x-request-id": sane})
    assert response.headers["x-request-id"] == sane
    for given in ("", "two words", "x" * 129, "naïve".encode(), "a,b"):
        response = await service.http.get("/live", headers={"x-request-id": given})
        assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


async def test_equal_request_ids_of_two_clients_differ_in_an_engine(service: Service) -> None:
    headers = {"x-request-id": "mine"}
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
    answers = await asyncio.gather(
        *(service.http.post("/v1/completions", json={**body, "seed": seed}, headers=headers) for seed in (1, 2))
    )
    assert [answer.status_code for answer in answers] == [200, 200]
    first = service.cluster.members[0].submitted
    assert len({request.request_id for request in first}) == 2
    assert all(request.request_id.startswith("mine-") for request in first)


@pytest.mark.parametrize("given", [None, "Bearer wrong", "right", "Basic right", "Bearer", "Bearer right wrong"])
async def test_without_a_valid_key_only_probes_are_answered(start: Callable[..., Service], given: str | None) -> None:
    service = start(Role.UNIFIED, api_keys=["right", "also-right"])
    headers = {} if given is None else {"authorization": given}
    for path in ("/health", "/live", "/metrics"):
        assert (await service.http.get(path, headers=headers)).status_code == 200
    for path in ("/v1/models", "/v1/cluster/ranks", "/v1/nothing", "/tokenize"):
        response = await service.http.get(path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"


async def test_each_key_is_accepted(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, api_keys=["right", "also-right"])
    for key in ("right", "also-right"):
        response = await service.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200


async def test_metrics_count_requests_and_tokens(disaggregated: Service) -> None:
    service = disaggregated
    await service.complete([5] * 20, max_tokens=4, ignore_eos=True)
    await service.complete([6] * 20, max_tokens=4, ignore_eos=True, stream=True)
    await service.complete("hello", temperature=-1)
    await service.http.get("/wp-login.php")
    samples = await service.metrics()
    model = 'model_name="tiny"'
    assert samples[f"baton_prompt_tokens_total{{{model}}}"] == 40
    assert samples[f"baton_generation_tokens_total{{{model}}}"] == 8
    assert samples[f'baton_request_success_total{{finished_reason="length",{model}}}'] == 2
    assert samples[f"baton_time_to_first_token_seconds_count{{{model}}}"] == 2
    assert samples[f"baton_inter_token_latency_seconds_count{{{model}}}"] == 6
    assert samples[f"baton_e2e_request_latency_seconds_count{{{model}}}"] == 3
    assert samples['baton_http_responses_total{route="/v1/completions",status="200"}'] == 2
    assert samples['baton_http_responses_total{route="/v1/completions",status="400"}'] == 1
    assert samples['baton_http_responses_total{route="other",status="404"}'] == 1
    assert samples['baton_requests_by_path_total{path="disaggregated",reason="least-loaded"}'] == 2
    assert samples['baton_engines{role="prefill"}'] == 1
    assert samples["baton_gateway_requests_inflight"] == 0


async def test_the_table_of_ranks_shows_from_which_engines_an_engine_reads(disaggregated: Service) -> None:
    lanes = [
        PeerLane(engine_id="prefill-0", transport="nixl/UCX", bytes_per_s=4e8, is_slow=True),
        PeerLane(engine_id="prefill-9", transport="nixl/UCX staged", bytes_per_s=None, is_slow=False, is_staged=True),
    ]
    disaggregated.cluster.members[1].transfers = TransferStats(lanes=lanes)
    table = (await disaggregated.http.get("/v1/cluster/ranks")).json()["data"]
    assert [rank["reads_from"] for rank in table] == [[], [msgspec.to_builtins(lane) for lane in lanes]]


async def test_metrics_show_messages_that_were_lost_between_engines_and_the_gateway(disaggregated: Service) -> None:
    disaggregated.cluster.client_counters = ClientCounters(
        malformed_messages=1, stale_messages=2, engines_lost=3, block_gaps=4
    )
    samples = await disaggregated.metrics()
    assert samples["baton_gateway_messages_malformed_total"] == 1
    assert samples["baton_gateway_messages_stale_total"] == 2
    assert samples["baton_engine_connections_lost_total"] == 3
    assert samples["baton_block_news_missed_total"] == 4


async def test_an_unknown_scope_of_metrics_is_refused(disaggregated: Service) -> None:
    for scope, status in {"": 400, "all": 400, "node": 200, "application": 200}.items():
        response = await disaggregated.http.get("/metrics", params={"scope": scope})
        assert response.status_code == status
    refusal = (await disaggregated.http.get("/metrics?scope=x")).json()["error"]
    assert refusal["message"].startswith("scope is application or node, not")


async def test_the_refusal_of_a_full_gateway_says_when_to_retry(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, max_inflight_requests=1)
    service.cluster.members[0].running.clear()
    first = asyncio.create_task(service.complete("hello", max_tokens=2))
    async with asyncio.timeout(20):
        while not service.cluster.members[0].submitted:
            await asyncio.sleep(0.001)
    second = await service.complete("hello")
    assert second.status_code == 429
    assert second.headers["retry-after"]
    service.cluster.members[0].running.set()
    assert (await first).status_code == 200
    assert (await service.complete("hello")).status_code == 200


async def test_long_texts_are_tokenized_in_a_thread_of_their_own(
    start: Callable[..., Service], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start(Role.UNIFIED, inline_tokenize_chars=100)
    threads = []
    encode = tokenizer.encode

    def recording(text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread())
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", recording)
    for prompt in ("x" * 100, "x" * 101):
        assert (await service.complete(prompt, max_tokens=1)).status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
