"""Clients of prefill and decode engines on two hosts with a slow cable, beside those of two unified engines.

    python -m tests.hosts.slow_handoffs --mbit 16 --json slow_handoffs.json

east has the prefill engine, west the decode engine, and the cable of east carries so many Mbit/s (`tc` with tbf). Three
applications serve the same questions, one after the other: unified engines; engines that always hand over, as if each
hand-off were fast; engines whose gateway goes by what they measure. As root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from baton.cluster.recall import make_questions

from .hosts import Hosts
from .ray_hosts import EAST, ENGINE_HOSTS, HEAD, ROLES, WEST, BatonOnHosts, demo_config

LENGTHS = (400, 1500)  # tokens of a prompt, about
STREAMS = 2
TOKENS = 32
ALWAYS_S = 1e6  # every hand-off takes less


def application(kind: str, hosts: Hosts) -> dict[str, Any]:
    config = demo_config()
    args = config["applications"][0]["args"]
    del args["gateway"]["cost"]
    fleet = {"replicas": 1, "num_cpus": 0.9}
    if kind == "unified":
        args["fleets"] = {"unified": fleet | {"replicas": 2, "num_cpus": 1.8}}  # one a host
        return config
    places = dict(zip(ROLES, (EAST, WEST), strict=True))
    args["fleets"] = {role: fleet | {"resources": {f"node:{hosts[at].ip}": 0.01}} for role, at in places.items()}
    if kind == "always":
        args["gateway"]["cost"] = {"slow_handoff_s": ALWAYS_S}
    return config


def slow_down(hosts: Hosts, mbit: float) -> None:
    limit = ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{mbit}mbit"]
    hosts[EAST].run([*limit, "burst", "32kb", "latency", "400ms"], timeout_s=10)


async def ask_all(url: str, number: int) -> dict[str, Any]:
    """Ask so many different questions, `STREAMS` at a time, after as many that only warm up and let engines measure."""
    first_s: list[float] = []
    whole_s: list[float] = []
    paths: Counter[str] = Counter()
    gate = asyncio.Semaphore(STREAMS)
    questions = make_questions(LENGTHS, number, seed=1)

    async def ask(http: httpx.AsyncClient, prompt: str, *, counts: bool) -> None:
        body = {"model": "baton-demo", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        async with gate:
            began_s, seen_s = time.monotonic(), 0.0
            async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data:") and not seen_s:
                        seen_s = time.monotonic() - began_s
            if counts:
                first_s.append(seen_s)
                whole_s.append(time.monotonic() - began_s)
                paths[answer.headers["x-baton-path"]] += 1

    async with httpx.AsyncClient(timeout=300.0) as http:
        half = len(questions) // 2
        await asyncio.gather(*(ask(http, question.prompt, counts=False) for question in questions[:half]))
        await asyncio.gather(*(ask(http, question.prompt, counts=True) for question in questions[half:]))
    return {
        "ttft_p50_s": statistics.median(first_s),
        "whole_p50_s": statistics.median(whole_s),
        "whole_p90_s": statistics.quantiles(whole_s, n=10)[-1],
        "whole_max_s": max(whole_s),
        "paths": dict(paths),
    }


def measure(kind: str, mbit: float, number: int) -> Mapping[str, Any]:
    with Hosts(HEAD, *ENGINE_HOSTS) as hosts, BatonOnHosts(hosts) as baton:
        baton.start_ray()
        config = application(kind, hosts)
        baton.is_whole = lambda: _serves(baton, config)  # type: ignore[method-assign]
        baton.deploy(config)
        slow_down(hosts, mbit)
        found = asyncio.run(ask_all(baton.url, number))
        lanes = [lane for rank in baton.ranks() for lane in rank["reads_from"]]
        return found | {"bytes_per_s": [lane["bytes_per_s"] for lane in lanes]}


def _serves(baton: BatonOnHosts, config: Mapping[str, Any]) -> bool:
    wanted = sum(fleet["replicas"] for fleet in config["applications"][0]["args"]["fleets"].values())
    try:
        return len(baton.ranks()) == wanted and httpx.get(f"{baton.url}/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--mbit", type=float, required=True)
    words.add_argument("--questions", type=int, default=20, help="of each length; half of them warm up")
    words.add_argument("--kinds", nargs="+", default=["unified", "always", "measured"])
    words.add_argument("--json", type=Path)
    given = words.parse_args()
    found = {}
    for kind in given.kinds:
        found[kind] = measure(kind, given.mbit, given.questions)
        print(kind, json.dumps(found[kind]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
