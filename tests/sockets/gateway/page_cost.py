"""Measure the CPU time that open pages cost a gateway: with PAGES windows of Chromium, and without.

python -m tests.sockets.gateway.page_cost URL [PAGES [SECONDS]]

The gateway must run on this machine and be idle. Prints the use of one core, in percent: without pages, with them, and
without them again, each over SECONDS, and the number of requests of the pages.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from pathlib import Path

import httpx

from ...helpers.chromium import Tab, chromium

SETTLE_S = 5.0  # after windows have been opened
ASKED = re.compile(
    r'^baton_http_responses_total\{.*route="(/v1/cluster/ranks|/metrics)",status="200"} (\S+)$', re.MULTILINE
)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, in seconds: fields 14 and 15 of proc_pid_stat(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def answers(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the number of answers so far, by route."""
    return {route: float(count) for route, count in ASKED.findall((await client.get("/metrics")).text)}


async def measure(client: httpx.AsyncClient, pid: int, seconds: float, name: str) -> None:
    before, began_s = await answers(client), cpu_s(pid)
    await asyncio.sleep(seconds)
    share = (cpu_s(pid) - began_s) / seconds
    asked = {route: count - before.get(route, 0.0) for route, count in (await answers(client)).items()}
    print(f"{name:>12}: {100 * share:.2f} % of a core, answers: {asked}", flush=True)


async def open_windows(tab: Tab, url: str, pages: int) -> None:
    """Open the page in so many windows, all of them visible."""
    await tab.open(url)
    for _ in range(pages - 1):
        await tab.call("Target.createTarget", url=url, newWindow=True)
    await asyncio.sleep(SETTLE_S)


async def main(url: str, pages: int = 10, seconds: float = 60.0) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        ranks = (await client.get("/v1/cluster/ranks")).json()
        pid = next(each["pid"] for each in ranks["gateways"] if each["gateway"] == ranks["gateway"])
        await measure(client, pid, seconds, "no page")
        with tempfile.TemporaryDirectory() as folder:
            async with chromium(Path(folder)) as tab:
                await open_windows(tab, url, pages)
                await measure(client, pid, seconds, f"{pages} pages")
        await measure(client, pid, seconds, "no page")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *(kind(word) for kind, word in zip((int, float), sys.argv[2:], strict=False))))
