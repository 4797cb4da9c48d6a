"""One gateway over a fake engine, as a process of its own: what attacks on it cost is read from /proc.

python -m tests.sockets.gateway.attacked_gateway PORT SETTINGS      serves until it is terminated; SETTINGS is JSON
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from baton.cluster.contracts import Role
from baton.cluster.gateway import GatewaySettings, create_app
from baton.cluster.gateway.middleware import Drain
from baton.cluster.ingress.http_server import HttpServer, listen

from ... import ROOT
from ...helpers.fake_cluster import FakeCluster
from ...helpers.tiny_model import tiny_model, tiny_tokenizer

STEP_S = 0.01  # of the engine
MAX_MODEL_LEN = 40_000  # of a model with room for large prompts


class AttackedGateway:
    """The process, from outside."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port = process, port
        self.url = f"http://127.0.0.1:{port}"

    def tree(self) -> list[int]:
        """Return the process and its children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [self.process.pid, *map(int, children.split())]

    def memory_mib(self, kind: str) -> dict[int, float]:
        """Return `VmRSS` or `VmHWM` of the process and its children."""
        sizes = {}
        for pid in self.tree():
            status = Path(f"/proc/{pid}/status").read_text()
            sizes[pid] = int(re.search(rf"^{kind}:\s+(\d+)", status, re.MULTILINE)[1]) / 1024  # type: ignore[index]
        return sizes

    def files_mib(self) -> float:
        """Return the size of all files in memory that the process has open."""
        files = Path(f"/proc/{self.process.pid}/fd").iterdir()
        total = 0
        for file in files:
            with contextlib.suppress(OSError):
                if "memfd:body" in os.readlink(file):
                    total += file.stat().st_size
        return total / 2**20


@contextlib.contextmanager
def attacked_gateway(**settings: object) -> Iterator[AttackedGateway]:
    """A process that serves, ended at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", __name__, str(port), json.dumps(settings)]
    process = subprocess.Popen(command, cwd=ROOT)
    gateway = AttackedGateway(process, port)
    try:
        deadline_s = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{gateway.url}/live", timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None, "the gateway has ended"
                assert time.monotonic() < deadline_s, "the gateway does not serve"
                time.sleep(0.1)
        yield gateway
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _serve(port: int, settings: dict[str, object]) -> None:
    model = tiny_model(tiny_tokenizer(), MAX_MODEL_LEN)
    cluster = FakeCluster(
        {},
        num_blocks=8192,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=list(model.eos_token_ids),
    )
    cluster.start(Role.UNIFIED).step_s = STEP_S
    drain = Drain()
    server = HttpServer(
        create_app(cluster, model, GatewaySettings(**settings), drain), drain, drain_s=0.0, drain_timeout_s=1.0
    )
    server.start(listen("127.0.0.1", port, share=False))
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    await told.wait()
    await server.drain()
    await cluster.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), json.loads(sys.argv[2])))
