"""The output of `baton top` and `baton status --watch`, with a gateway that answers and with one that stops."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
from collections.abc import Callable

import httpx
import pytest
from rich.console import Console, Group

from baton.cluster.cli.top import COUNTERS, FleetView
from baton.cluster.contracts import Role

from ...helpers.baton_command import run_baton
from ...helpers.gateway_service import Service

FRAMES = ("--iterations", "2", "--interval", "0.3")


async def baton(*words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_baton, *words)


async def asked(service: Service) -> None:
    """Wait until the gateway has answered the command once."""
    async with asyncio.timeout(20):
        while not any("/v1/cluster/ranks" in name for name in await service.metrics()):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)  # less than the interval to the command's next request


@pytest.mark.slow
async def test_top_shows_engines_latencies_and_failures_of_the_last_minute(start: Callable[..., Service]) -> None:
    service = start(Role.PREFILL, Role.DECODE)
    async with service.over_tcp() as url:
        shown = asyncio.create_task(baton("top", "--url", url, "--iterations", "2", "--interval", "3"))
        await asked(service)
        answered = await service.complete("the quick brown fox", max_tokens=8, ignore_eos=True)
        assert answered.status_code == 200
        late = await service.http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "x", "max_tokens": 200, "ignore_eos": True},
            headers={"request-timeout-ms": "1"},
        )
        assert late.status_code == 408
        done = await shown
    assert (done.returncode, done.stderr) == (0, "")
    first, _, last = done.stdout.rpartition("Serving")
    assert "engines 2   gateways 0" in first
    assert "first token –" in first
    for engine in service.cluster.members:
        assert engine.record.engine_id in last
    assert "first token p50 " in last
    assert "between tokens p50 " in last
    assert "408 of /v1/completions" in last


async def test_top_says_that_no_path_can_serve_and_that_the_gateway_does_not_answer(
    start: Callable[..., Service],
) -> None:
    service = start(Role.PREFILL, api_keys=["secret"])
    async with service.over_tcp() as url:
        refused = await baton("top", "--url", url, *FRAMES)
        shown = await baton("top", "--url", url, "--api-key", "secret", *FRAMES)
    gone = await baton("top", "--url", url, *FRAMES)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "key" in refused.stderr.lower()
    assert shown.stdout.count("Not serving: no engine can take a request") == 2
    assert (gone.returncode, gone.stdout) == (1, "")
    assert f"no answer from {url}" in gone.stderr


@pytest.mark.parametrize(
    "words", [("status",), ("eval", "recall"), ("bench", "serve"), ("bench", "serve", "--model", "tiny")]
)
async def test_commands_say_that_a_key_is_needed(start: Callable[..., Service], words: tuple[str, ...]) -> None:
    async with start(Role.UNIFIED, api_keys=["secret"]).over_tcp() as url:
        refused = await baton(*words, "--url", url)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert " key " in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "HTTPStatusError" not in refused.stderr


@pytest.mark.slow
async def test_status_with_watch_is_shown_repeatedly(service: Service) -> None:
    async with service.over_tcp() as url:
        people = await baton("status", "--url", url, "--watch", *FRAMES)
        programs = await baton("status", "--url", url, "--watch", "--json", *FRAMES)
    assert people.stdout.count("Engines") == people.stdout.count("ready") == 2
    lines = [json.loads(line) for line in programs.stdout.splitlines()]
    assert [line["ready"] for line in lines] == [True, True]
    assert all(line["data"] for line in lines)


@pytest.mark.slow
async def test_status_with_watch_continues_without_an_answer(service: Service) -> None:
    async with service.over_tcp() as url:
        watching = asyncio.create_task(
            baton("status", "--url", url, "--watch", "--json", "--iterations", "2", "--interval", "2.5")
        )
        await asked(service)
    done = await watching
    first, last = (json.loads(line) for line in done.stdout.splitlines())
    assert first["ready"] is True
    assert last == {"ready": False, "error": last["error"]}
    assert "no answer from" in last["error"]
    assert done.returncode == 1


def test_a_terminal_of_80_characters_shows_every_column_and_requests_in_a_step_as_running() -> None:
    stats = dict.fromkeys(("num_requests_running", "num_requests_waiting_for_kv", *COUNTERS), 0)
    engine = {"num_running": 9, "stats": stats | {"num_requests_waiting": 3, "kv_usage": 0.5}}
    about = {"draining": False, "reachable": True, "circuit": "closed", "epoch": "1", "reads_from": []}
    ranks = [engine | about | {"rank": 0, "role": "prefill", "engine_id": "prefill-0123abcd"}]
    answers = {
        "/health": httpx.Response(200),
        "/v1/cluster/ranks": httpx.Response(
            200, json={"object": "list", "gateway": "g", "data": ranks, "gateways": [], "starting": []}
        ),
        "/metrics": httpx.Response(200, text=""),
    }
    transport = httpx.MockTransport(lambda request: answers[request.url.path])
    fleet = FleetView(httpx.Client(transport=transport, base_url="http://gateway"))
    fleet.update()
    for width, columns in ((80, "KV    read/s  written/s"), (200, "read tok/s  written tok/s  leases")):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(Group(*fleet.parts()))
        shown = console.export_text()
        assert columns in shown
        assert "…" not in shown
        assert "running 9   waiting 3" in shown
