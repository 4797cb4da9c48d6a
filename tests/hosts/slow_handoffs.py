"""Compare clients of prefill and decode engines on two hosts with a slow cable to clients of two unified engines.

    python -m tests.hosts.slow_handoffs --mbit 16 --json slow_handoffs.json

east has the prefill engine, west the decode engine, and the cable of east carries so many Mbit/s (`tc` with tbf). Three
applications serve the same questions, one after the other: unified engines; engines that always hand over, as if each
hand-off were fast; engines whose gateway decides by its measurements. Needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from baton.cluster.recall import Question, make_questions

from .hosts import Hosts
from .ray_hosts import EAST, ENGINE_HOSTS, HEAD, ROLES, WEST, BatonOnHosts, demo_config

LENGTHS = (400, 1500)  # tokens of a prompt, about
STREAMS = 2
TOKENS = 32
ALWAYS_S = 1e6  # an assumed time that every hand-off beats


@dataclass(frozen=True)
class Answer:
    """An answer that counts. Its times are the client's; those in `parts` are the gateway's."""

    length: int  # of the prompt, about
    began_s: float  # from the start of the run
    first_s: float
    whole_s: float
    path: str
    parts: list[dict[str, Any]]  # `baton_timeline`


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
    """Ask so many different questions, `STREAMS` at a time; as many before them warm up engines and meters."""
    answers: list[Answer] = []
    gate = asyncio.Semaphore(STREAMS)
    questions = make_questions(LENGTHS, number, seed=1)
    start_s = time.monotonic()

    async def ask(http: httpx.AsyncClient, question: Question, *, counts: bool) -> None:
        fields = {"model": "baton-demo", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        body = fields | {"prompt": question.prompt, "baton_timeline": True}
        async with gate:
            began_s, seen_s, last = time.monotonic(), 0.0, ""
            async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        seen_s, last = seen_s or time.monotonic() - began_s, line
            if counts:
                path, whole_s = response.headers["x-baton-path"], time.monotonic() - began_s
                parts = json.loads(last.removeprefix("data: "))["baton_timeline"][0]["parts"]
                answers.append(Answer(question.length, began_s - start_s, seen_s, whole_s, path, parts))

    async with httpx.AsyncClient(timeout=300.0) as http:
        half = len(questions) // 2
        await asyncio.gather(*(ask(http, question, counts=False) for question in questions[:half]))
        await asyncio.gather(*(ask(http, question, counts=True) for question in questions[half:]))
    whole_s = [answer.whole_s for answer in answers]
    return {
        "ttft_p50_s": statistics.median(answer.first_s for answer in answers),
        "whole_p50_s": statistics.median(whole_s),
        "whole_p90_s": statistics.quantiles(whole_s, n=10)[-1],
        "whole_max_s": max(whole_s),
        "paths": dict(Counter(answer.path for answer in answers)),
        "answers": [dataclasses.asdict(answer) for answer in answers],
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
        print(kind, json.dumps({name: value for name, value in found[kind].items() if name != "answers"}), flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
