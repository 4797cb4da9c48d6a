"""The comparison of servers, with stand-ins for a server and for vLLM's client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "compare_servers.py"
CLIENT = """
import asyncio, os
from pathlib import Path

def add_cli_args(parser):
    for name in ("backend", "base-url", "endpoint", "model", "tokenizer", "dataset-name", "temperature", "seed"):
        parser.add_argument(f"--{name}")
    for name in ("random-input-len", "random-output-len", "max-concurrency", "num-prompts"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--percentile-metrics")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--disable-tqdm", action="store_true")

async def main_async(given):
    if os.environ.get("HANGS"):
        Path(os.environ["HANGS"]).touch()
        await asyncio.sleep(600)
    times = dict.fromkeys(("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms"), 1.5)
    return {"output_throughput": 10.0 * given.max_concurrency, "completed": given.num_prompts, "failed": 0, **times}
"""
SERVER = """
import os, sys
from pathlib import Path
from http.server import BaseHTTPRequestHandler, HTTPServer

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

Path(sys.argv[0]).with_name(f"process.{os.getpid()}").touch()
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


class Comparison:
    """A folder with a model, a server, and vLLM's client; and the tool."""

    def __init__(self, folder: Path) -> None:
        client = folder / "vllm" / "benchmarks" / "serve.py"
        client.parent.mkdir(parents=True)
        client.write_text(CLIENT)
        (folder / "server.py").write_text(SERVER)
        self.folder, self.out = folder, folder / "results.jsonl"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    def start(self, *words: object, **environment: str) -> subprocess.Popen[str]:
        given = ["/m-0.6b", "--servers", "vllm", "--vllm", f"{sys.executable} {self.folder / 'server.py'}"]
        given += ["--port", str(self.port), "--out", str(self.out), *map(str, words)]
        variables = {"PYTHONPATH": str(self.folder), "PATH": "/usr/bin:/bin", **environment}
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, TOOL, *given], env=variables, text=True, stderr=pipe, stdout=pipe)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()] if self.out.exists() else []

    def servers(self) -> list[Path]:
        """Return the servers that run, by the files of their processes."""
        return [file for file in self.folder.glob("process.*") if Path("/proc", file.suffix[1:]).exists()]


@pytest.fixture
def comparison(tmp_path: Path) -> Iterator[Comparison]:
    made = Comparison(tmp_path)
    yield made
    for left in made.servers():
        os.kill(int(left.suffix[1:]), signal.SIGKILL)


def test_each_cell_is_a_row_and_none_is_measured_twice(comparison: Comparison) -> None:
    process = comparison.start("--cells", "512/256:1,8", "8192/64:8")
    assert process.wait(60) == 0, process.communicate()
    found = [(row["length"], row["clients"], row["completed"], row["output_throughput"]) for row in comparison.rows()]
    assert found == [("512/256", 1, 6, 10.0), ("512/256", 8, 32, 80.0), ("8192/64", 8, 16, 80.0)]
    process = comparison.start("--cells", "512/256:1,8,64")
    assert process.wait(60) == 0, process.communicate()
    assert [row["clients"] for row in comparison.rows()] == [1, 8, 8, 64]
    assert not comparison.servers()


def test_a_program_at_the_port_is_not_measured(comparison: Comparison) -> None:
    with socket.create_server(("127.0.0.1", comparison.port)):
        process = comparison.start()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"a program listens at port {comparison.port}" in errors
    assert not comparison.rows()


def test_a_comparison_that_is_ended_ends_its_servers(comparison: Comparison) -> None:
    hangs = comparison.folder / "hangs"
    process = comparison.start(HANGS=str(hangs))
    end_s = time.monotonic() + 60
    while not hangs.exists() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert comparison.servers()
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    process.communicate()
    assert not comparison.servers()
