"""A real load balancer in front of real gateways, all of them processes that a test starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from baton.cluster.cli.processes import descendants, kill

from .resumable_stream import Refused, ResumableStream

CONFIGS = Path(__file__).parents[2] / "configs/load_balancer"
NUM_TOKENS = 24
READY_S = 60.0


@dataclass(frozen=True)
class Balancer:
    """A load balancer's program, and how a test runs it with the configuration that Baton ships."""

    program: str
    config: str
    checks: Callable[[Path], list[str]]
    runs: Callable[[Path], list[str]]
    drain_s: float  # drain time of the gateways behind it
    without: str = ""  # a line that the test removes from the configuration

    def configure(self, folder: Path, port: int, gateways: list[int]) -> Path:
        """Write the shipped configuration with another port and a line for each gateway, without the line `without`."""
        text = (CONFIGS / self.config).read_text()
        assert self.without in text
        text = text.replace(self.without, "")
        text, found = re.subn(r"9000\b", str(port), text)
        assert found == 1
        first, second = re.findall(r"^.* 127\.0\.0\.1\D+800[01]\b.*\n", text, re.MULTILINE)
        assert first + second in text
        lines = [first.replace("8000", str(port)).replace("gateway0", f"gateway{i}") for i, port in enumerate(gateways)]
        text = text.replace(first + second, "".join(lines))
        file = folder / self.config
        file.write_text(text)
        return file


def _nginx(*more: str) -> Callable[[Path], list[str]]:
    def command(file: Path) -> list[str]:
        return ["nginx", "-p", str(file.parent), "-c", str(file), "-g", f"pid {file.parent}/pid; daemon off;", *more]

    return command


HAPROXY = Balancer(
    program="haproxy",
    config="haproxy.cfg",
    checks=lambda file: ["haproxy", "-c", "-f", str(file)],
    runs=lambda file: ["haproxy", "-db", "-f", str(file)],
    drain_s=4.0,
)
NGINX = Balancer(program="nginx", config="nginx.conf", checks=_nginx("-t"), runs=_nginx(), drain_s=0.0)
_ENVOY = str(Path(sys.executable).with_name("envoy"))  # a Python package brings it: Debian has none
ENVOY = Balancer(
    program=_ENVOY,
    config="envoy.yaml",
    checks=lambda file: [_ENVOY, "--mode", "validate", "-c", str(file)],
    runs=lambda file: [_ENVOY, "--disable-hot-restart", "-c", str(file)],
    drain_s=4.0,
)
BALANCERS = [HAPROXY, NGINX]
ALL_BALANCERS = [*BALANCERS, ENVOY]


def is_missing(program: str) -> bool:
    """Return whether a program is missing; in continuous integration, where no test may be skipped, fail instead."""
    return shutil.which(program) is None and not os.environ.get("CI")


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command, and end it afterwards, with the workers that it has started, whatever happens."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        below = descendants(process.pid)
        process.kill()
        process.wait()
        kill(below)


def wait_until_healthy(port: int) -> None:
    deadline_s = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                return
        assert time.monotonic() < deadline_s, f"nobody answers at port {port}"
        time.sleep(0.05)


def answered_by(port: int) -> float:
    """Return how many requests the gateway at this port has served; its scrape may include other gateways, too."""
    url = f"http://127.0.0.1:{port}"
    gateway = httpx.get(f"{url}/v1/cluster/ranks").json()["gateway"]
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    names = [
        f'baton_http_responses_total{{{own}route="/v1/completions",status="200"}} '
        for own in ("", f'gateway="{gateway}",')
    ]
    return sum(float(line.removeprefix(name)) for line in lines for name in names if line.startswith(name))


@dataclass
class Load:
    """Clients that send requests in a loop, each on its own connections."""

    port: int
    clients: int
    stream: bool
    keep_alive: bool = True
    resumable: bool = False  # continue a broken stream at the next gateway
    model: str = "tiny"
    failures: list[str] = field(default_factory=list)
    answered: int = 0
    resumed: int = 0
    answers: set[tuple[int, str]] = field(default_factory=set)  # each client always sends the same request
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def under_way(self) -> AsyncIterator[Load]:
        tasks = [asyncio.create_task(self._ask(number)) for number in range(self.clients)]
        try:
            yield self
        finally:
            self._stop.set()
            async with asyncio.timeout(30):
                await asyncio.gather(*tasks)

    async def _ask(self, number: int) -> None:
        body = {
            "model": self.model,
            "prompt": [5 + number] * 40,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "seed": 1,
        }
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=30) as http:
            while not self._stop.is_set():
                try:
                    await (self._stream_once(http, number, body) if self.resumable else self._ask_once(http, body))
                except (httpx.HTTPError, Refused, AssertionError) as error:
                    self.failures.append(f"{type(error).__name__}: {error}")

    async def _ask_once(self, http: httpx.AsyncClient, body: dict[str, object]) -> None:
        headers = {} if self.keep_alive else {"connection": "close"}
        response = await http.post("/v1/completions", json=body | {"stream": self.stream}, headers=headers)
        assert response.status_code == 200, response.text
        if self.stream:
            *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n")[:-1]]
            assert done == "[DONE]", response.text[-300:]
            finish = json.loads(events[-1])["choices"][0]["finish_reason"]
        else:
            finish = response.json()["choices"][0]["finish_reason"]
        assert finish == "length"
        self.answered += 1

    async def _stream_once(self, http: httpx.AsyncClient, number: int, body: dict[str, object]) -> None:
        stream = ResumableStream(http, "/v1/completions", body)
        choices = [choice async for event in stream.events() for choice in event["choices"]]
        self.answers.add((number, "".join(choice["text"] for choice in choices)))
        self.resumed += stream.num_resumed > 0
        assert choices[-1]["finish_reason"] == "length"
        self.answered += 1
