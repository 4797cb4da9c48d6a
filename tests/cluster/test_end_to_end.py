"""`baton serve` with one prefill and one decode engine, from a user's point of view.

The tests share one server, also with those of `test_faults_end_to_end.py`, which come next.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from baton.cluster.contracts import Role, StartingGroup
from baton.cluster.gateway.routing.breaker import CircuitState
from baton.cluster.gateway.serving.timeline import Stamp
from baton.engine.core.messages import ExpertReview
from baton.engine.core.speculation.stats import SpeculationStats
from baton.engine.core.tiers import TierStats

from ..helpers.served import BATON, Server, eventually
from .served_pair import STREAMS, answer_to, answers, prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]
MODEL = Path(__file__).parents[2] / "configs/demo/model"


async def test_the_openai_client_is_answered_through_prefill_and_decode(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="baton-demo",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=8,
        extra_body={"ignore_eos": True},
    )
    assert raw.headers["x-baton-path"].startswith("disaggregated")
    answer = raw.parse()
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


async def test_a_stream_ends_with_its_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="baton-demo",
        prompt="Hello",
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    events = [event async for event in stream]
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 5


NOT_IN_AN_ANSWER = (Stamp.LAST_BYTE, Stamp.FAILED, Stamp.RESUMED)


def test_the_load_generator_measures_the_server(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["--url", server.url, "--num-prompts", "8", "--input-len", "32", "--output-len", "8", "--json", str(file)]
    subprocess.run([BATON, "bench", "serve", "--timeline", *words], check=True, capture_output=True, timeout=60)
    result = json.loads(file.read_text())
    assert result["completed"] == 8
    assert result["failed"] == 0
    assert result["total_output_tokens"] == 64
    assert 0 < result["median_ttft_ms"] < result["median_e2el_ms"]
    assert list(result["median_parts_ms"]) == [stamp for stamp in Stamp if stamp not in NOT_IN_AN_ANSWER]


def test_status_lists_the_engines(server: Server) -> None:
    done = subprocess.run([BATON, "status", "--url", server.url], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert "prefill" in done.stdout
    assert "internal" in done.stdout, "gateways are listed, too"
    assert "ready" in done.stdout


OPERATIONS = Path(__file__).parents[2] / "docs/operate/operations.md"
NO_FIELDS = {Role.UNIFIED, *CircuitState, "list", "null"}  # code words in the page's table that are no fields


def test_status_tells_programs_every_field_that_the_page_for_operators_names_and_no_other(server: Server) -> None:
    command = [BATON, "status", "--json", "--url", server.url]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    told = json.loads(done.stdout)
    assert told["ready"] is True
    assert sorted((rank["role"], rank["pid"]) for rank in told["data"]) == sorted(
        (rank["role"], rank["pid"]) for rank in server.ranks()
    )
    table = OPERATIONS.read_text().partition("\n## Status\n")[2].partition("\n## ")[0].partition("|")[2]
    sometimes = (ExpertReview, SpeculationStats, StartingGroup, TierStats)
    fields = set(keys_in(told)).union(*(kind.__struct_fields__ for kind in sometimes))
    assert set(re.findall(r"`([a-z_]+)`", table)) - NO_FIELDS == fields


def keys_in(value: Any) -> Iterator[str]:
    """Return the keys of all mappings, at any depth."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from keys_in(part)


CALLS = """
import json, sys
import ray
from ray import serve

ray.init(sys.argv[1], log_to_driver=False)
gateway = serve.get_app_handle("main")
body = {"model": "baton-demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
whole = gateway.chat.remote(body).result(timeout_s=60)["choices"][0]["message"]["content"]
chunks = list(gateway.options(stream=True).stream_chat.remote(body))
text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
try:
    gateway.completions.remote({"model": "baton-demo", "prompt": "x", "temperature": -1}).result(timeout_s=60)
except Exception as error:
    refused = [error.status, error.error["param"]]
print("CALLS", json.dumps([whole, text, refused]))
"""


def test_other_serve_applications_call_the_gateways_through_their_handle(server: Server) -> None:
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-c", CALLS, server.gcs_address()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    told = next(line for line in done.stdout.splitlines() if line.startswith("CALLS "))
    whole, text, refused = json.loads(told.removeprefix("CALLS "))
    assert whole == text != ""
    assert refused == [400, "temperature"]


async def test_an_unknown_field_is_refused_by_name(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperture"):
        await client.completions.create(model="baton-demo", prompt="Hello", extra_body={"temperture": 1})


async def test_an_answer_fits_its_grammar_through_prefill_and_decode(client: openai.AsyncOpenAI) -> None:
    for asked in ({"choice": ["red fox", "lazy dog"]}, {"regex": "[0-9]{4}-[0-9]{2}"}):
        answer = await client.completions.create(
            model="baton-demo", prompt="Hello", max_tokens=40, seed=1, extra_body={"structured_outputs": asked}
        )
        assert answer.choices[0].finish_reason == "stop"
        assert re.fullmatch("red fox|lazy dog|[0-9]{4}-[0-9]{2}", answer.choices[0].text)
    with pytest.raises(openai.BadRequestError, match="cannot be compiled"):
        await client.completions.create(
            model="baton-demo", prompt="Hello", extra_body={"structured_outputs": {"regex": "(a"}}
        )


def test_values_are_recalled_through_prefill_and_decode_at_every_length(server: Server, tmp_path: Path) -> None:
    """The demo model knows the answers; a lost, stale or misplaced block makes one of them wrong."""
    file = tmp_path / "recall.json"
    words = ["--base-url", server.url, "--samples", "10", "--seed", "7", "--json", str(file)]
    done = subprocess.run([BATON, "eval", "recall", *words], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["errors"] == 0
    assert result["accuracy"] >= 0.99, result
    assert all(line["accuracy"] >= 0.95 for line in result["by_length"].values()), result
    handed_over = sum(count for path, count in result["paths"].items() if path.startswith("disaggregated"))
    assert handed_over > 0.8 * sum(result["paths"].values()), "on a busy machine a few prompts are sooner computed anew"


@pytest.mark.parametrize("sampled", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 11, "top_p": 0.9}])
async def test_prefill_and_decode_give_the_tokens_of_one_engine(
    client: openai.AsyncOpenAI, sampled: dict[str, float]
) -> None:
    """The blocks go over NIXL; the reference engine runs in this process."""
    from baton.engine import LLM, SamplingParams

    prompts = [prompt_of(number) for number in range(4)]
    alone = LLM(str(MODEL), dtype="float32", num_threads=1, kv_cache_memory_bytes=2**26)
    params = SamplingParams(max_tokens=40, ignore_eos=True, **sampled)
    expected = [alone.generate(prompt, params, use_tqdm=False)[0].outputs[0].text for prompt in prompts]
    for prompt, text in zip(prompts, expected, strict=True):
        answer = await client.completions.create(
            model="baton-demo", prompt=prompt, max_tokens=40, extra_body={"ignore_eos": True, **sampled}
        )
        assert answer.choices[0].text == text


async def test_32_streams_at_once_get_the_answers_that_each_gets_alone(
    client: openai.AsyncOpenAI, server: Server
) -> None:
    alone = [await answer_to(client, number, 24) for number in range(STREAMS)]
    together = await answers(client, STREAMS, 24)
    assert together == alone
    assert len(set(alone)) > 4, "all prompts got much the same answer: mixed up streams would not show"
    server.wait_until_all_blocks_are_free()
    handed_over_early = lambda: server.counted("baton_kv_blocks_read_early_total") > 0  # noqa: E731
    eventually(handed_over_early, 5.0, "no block came before its prompt was read to its end")


async def test_the_blocks_of_clients_that_disconnect_come_back(server: Server) -> None:
    """Some clients leave during prefill, some during the transfer, some during decode."""
    async with httpx.AsyncClient(base_url=server.url, timeout=30.0) as http:

        async def leave_after(number: int) -> None:
            body = {
                "model": "baton-demo",
                "prompt": prompt_of(number),
                "max_tokens": 900,
                "stream": True,
                "ignore_eos": True,
            }
            request: Awaitable[httpx.Response] = http.post("/v1/completions", json=body)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(request, 0.01 + 0.02 * number)

        await asyncio.gather(*(leave_after(number) for number in range(STREAMS)))
    server.wait_until_all_blocks_are_free()
