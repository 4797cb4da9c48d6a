"""`baton top` and `baton status --watch`: what they show of a gateway that answers, and of one that stops."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable

import pytest

from baton.cluster.contracts import Role

from ...helpers.baton_command import run_baton
from ...helpers.gateway_service import Service

FRAMES = ("--iterations", "2", "--interval", "0.3")


async def baton(*words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_baton, *words)


async def asked(service: Service) -> None:
    """Wait until the command has been answered once."""
    async with asyncio.timeout(20):
        while not any("/v1/cluster/ranks" in name for name in await service.metrics()):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)  # its next request comes after its interval


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


async def test_top_says_that_nobody_can_serve_and_that_nobody_answers(start: Callable[..., Service]) -> None:
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


@pytest.mark.slow
async def test_status_is_shown_again_and_again(service: Service) -> None:
    async with service.over_tcp() as url:
        people = await baton("status", "--url", url, "--watch", *FRAMES)
        programs = await baton("status", "--url", url, "--watch", "--json", *FRAMES)
    assert people.stdout.count("Engines") == people.stdout.count("ready") == 2
    lines = [json.loads(line) for line in programs.stdout.splitlines()]
    assert [line["ready"] for line in lines] == [True, True]
    assert all(line["data"] for line in lines)


@pytest.mark.slow
async def test_status_goes_on_while_nobody_answers(service: Service) -> None:
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
