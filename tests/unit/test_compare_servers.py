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

from ..helpers.peers import CLIENT, SERVER

TOOL = Path(__file__).parents[2] / "tools" / "compare_servers.py"


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
