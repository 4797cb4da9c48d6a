"""Applications on a Ray cluster: deploying, scaling and upgrading them, with streams that must survive it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml

from baton.cluster.cli.processes import descendants, kill
from baton.cluster.recall import make_question

from .. import ROOT
from ..helpers.free_ports import free_port
from ..helpers.served import BATON, config_file, eventually, sum_of
from . import deployments

READY_S = 120.0
DRAIN_TIMEOUT_S = 20.0
PROCESSES = {"engines": "data", "gateways": "gateways"}  # keys in the table of ranks


class RayCluster:
    """A Ray cluster on which one application at a time is deployed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", deployments.__name__],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"},
        )
        self.address = self._line()

    def deploy(self, file: Path) -> None:
        """Deploy the application of a Serve config file, in place of the current one."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{file}\n")
        self._process.stdin.flush()
        assert self._line() == "deployed"

    def close(self) -> None:
        below = descendants(self._process.pid)
        self._process.kill()
        self._process.wait()
        kill(below)

    def _line(self) -> str:
        """Return its next line; fail if none comes, since a thread that waits for ever keeps all tests from ending."""
        assert self._process.stdout is not None
        said, _, _ = select.select([self._process.stdout], [], [], READY_S)
        assert said, f"the cluster has said nothing for {READY_S:.0f} s\n{self._what_it_does()}"
        line = self._process.stdout.readline().strip()
        assert line, "the cluster has ended"
        return line

    def _what_it_does(self) -> str:
        """Return the last lines of Serve's controller; the process prints where its threads are."""
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        logs = sorted(Path("/tmp/ray/session_latest/logs/serve").glob("controller_*.log"))
        return "\n".join(log.read_text()[-3000:] for log in logs)


class Cluster:
    """A Ray cluster with one application, whose configuration tests replace."""

    def __init__(self, ray: RayCluster, folder: Path, *, name: str, answer_tokens: int) -> None:
        self.answer_tokens = answer_tokens  # of each stream
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._ray, self._name, self._folder = ray, name, folder
        file = config_file(folder, name=name, port=self.port)
        self.config: dict[str, Any] = yaml.safe_load(file.read_text())
        args = self.args
        args["engine"] |= {"num_threads": 1, "kv_cache_memory_bytes": 2**26}
        for fleet in args["fleets"].values():
            fleet |= {"drain_timeout_s": DRAIN_TIMEOUT_S, "max_surge_percent": 100, "step_timeout_s": 60.0}
        args["gateway"] |= {"drain_s": 1, "drain_timeout_s": 30, "capacity_timeout_s": 90.0}

    @property
    def args(self) -> dict[str, Any]:
        args: dict[str, Any] = self.config["applications"][0]["args"]
        return args

    def deploy(self) -> None:
        file = self._folder / "deployed.yaml"
        file.write_text(yaml.safe_dump(self.config))
        self._ray.deploy(file)

    def scale(self, **replicas: int) -> None:
        """Change fleet sizes without an upgrade, in the file's own section for Serve, as an operator does."""
        deployments = [{"name": name, "num_replicas": count} for name, count in replicas.items()]
        self.config["applications"][0]["deployments"] = deployments
        self.deploy()

    def give_gateways(self, **user_config: Any) -> None:
        """Change the gateways' settings while they run."""
        self.config["applications"][0]["deployments"] = [{"name": "gateway", "user_config": user_config}]
        self.deploy()

    def drain(self, rank: int) -> None:
        words = [BATON, "drain", str(rank), "--app", self._name, "--address", self._ray.address]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    def ranks(self) -> list[dict[str, Any]]:
        table = httpx.get(f"{self.url}/v1/cluster/ranks", timeout=10.0).raise_for_status().json()
        return list(table["data"])

    def processes(self) -> dict[str, list[int]]:
        """Return the process ids of its engines and gateways."""
        table = httpx.get(f"{self.url}/v1/cluster/ranks", timeout=10.0).raise_for_status().json()
        return {name: sorted(each["pid"] for each in table[key]) for name, key in PROCESSES.items()}

    def wait_for(self, what: Callable[[list[dict[str, Any]]], bool]) -> None:
        eventually(lambda: what(self.ranks()), READY_S, lambda: f"it does not come to it: {self.ranks()}")

    def metric(self, name: str, **labels: str) -> float:
        return sum_of(httpx.get(f"{self.url}/metrics", timeout=10.0).raise_for_status().text, name, labels)


@dataclass
class Question:
    prompt: str
    value: str  # the value that the demo model should recall first
    answer: str = ""  # from an undisturbed server


@dataclass
class Load:
    """Continuous streams, and their outcome."""

    answers: list[tuple[Question, str]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    reconnects: int = 0  # a gateway's port closed before it answered, and another one was there

    @property
    def right(self) -> int:
        return sum(answer == question.answer for question, answer in self.answers)


async def answer_to(cluster: Cluster, question: Question) -> str:
    """Return the whole text of a greedy stream. Raises what `openai` raises."""
    client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120.0)
    async with client:
        stream = await client.completions.create(
            model="baton-demo",
            prompt=question.prompt,
            max_tokens=cluster.answer_tokens,
            temperature=0.0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        events = [event async for event in stream]
    assert events[-1].choices[0].finish_reason == "length"
    return "".join(event.choices[0].text for event in events)


def ask_undisturbed(cluster: Cluster, *, seed: int, count: int, longest: int) -> list[Question]:
    """Return questions of 60 to `longest` tokens that are answered with the right value, and these answers."""
    rng = random.Random(seed)
    asked = [Question(*make_question(rng, rng.randrange(60, longest))) for _ in range(count)]

    async def ask() -> list[str]:
        return list(await asyncio.gather(*(answer_to(cluster, question) for question in asked)))

    for question, answer in zip(asked, asyncio.run(ask()), strict=True):
        question.answer = answer
    known = [question for question in asked if question.answer.startswith(question.value)]
    assert len(known) >= count - 2, "the demo model knows nearly all"
    return known


@contextlib.asynccontextmanager
async def load_on(cluster: Cluster, questions: list[Question], streams: int = 5) -> AsyncIterator[Load]:
    """Keep so many streams open until the block ends; then wait for the last ones."""
    load, going = Load(), True

    async def ask(first: int) -> None:
        number = first
        while going:
            question = questions[number % len(questions)]
            try:
                load.answers.append((question, await answer_to(cluster, question)))
            except openai.APIConnectionError:
                load.reconnects += 1
                await asyncio.sleep(0.1)
                continue
            except Exception as error:
                load.lost.append(repr(error))
            number += streams

    tasks = [asyncio.create_task(ask(first)) for first in range(streams)]
    await asyncio.sleep(1.0)
    try:
        yield load
    finally:
        going = False
        await asyncio.gather(*tasks)


def roles(ranks: list[dict[str, Any]]) -> Counter[str]:
    """Count the roles of reachable engines that are not draining."""
    return Counter(rank["role"] for rank in ranks if not rank["draining"] and rank["reachable"])


async def in_thread(call: Callable[..., None], *args: Any, **named: Any) -> None:
    await asyncio.to_thread(call, *args, **named)


def settled(ranks: list[dict[str, Any]], **expected: int) -> bool:
    return len(ranks) == sum(expected.values()) and roles(ranks) == expected
