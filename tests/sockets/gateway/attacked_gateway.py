"""A gateway and an engine without a model, each in its own process. The gateway's memory is read from /proc.

python -m tests.sockets.gateway.attacked_gateway PORT STEP_S SETTINGS

runs until it is terminated; SETTINGS is JSON, and a step of the engine lasts STEP_S.
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

from baton.cluster.contracts import DirectorySnapshot, EngineRecord, Role
from baton.cluster.engine_client import ZmqEngineClient
from baton.cluster.gateway.app import create_app
from baton.cluster.gateway.middleware import Drain
from baton.cluster.gateway.model import ServedModel
from baton.cluster.gateway.settings import GatewaySettings
from baton.cluster.ingress.http_server import HttpServer, listen
from baton.engine.net.curve import ClusterKey

from ... import ROOT
from ...helpers.tiny_model import tiny_model, tiny_tokenizer
from . import attacked_engine

MAX_MODEL_LEN = 40_000  # allows large prompts
MAX_NUM_SEQS = 64
STEP_S = 0.01


class AttackedGateway:
    """The gateway's process, observed from outside."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port = process, port
        self.url = f"http://127.0.0.1:{port}"

    def tree(self) -> list[int]:
        """Return the ids of the process and of its body readers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [self.process.pid, *(pid for pid in map(int, children.split()) if not _is_engine(pid))]

    def memory_mib(self, kind: str) -> dict[int, float]:
        """Return `VmRSS` or `VmHWM` of each of these processes, by process id."""
        sizes = {}
        for pid in self.tree():
            status = Path(f"/proc/{pid}/status").read_text()
            sizes[pid] = int(re.search(rf"^{kind}:\s+(\d+)", status, re.MULTILINE)[1]) / 1024  # type: ignore[index]
        return sizes

    def files_mib(self) -> float:
        """Return the size of all open in-memory files of the process."""
        files = Path(f"/proc/{self.process.pid}/fd").iterdir()
        total = 0
        for file in files:
            with contextlib.suppress(OSError):
                if "memfd:body" in os.readlink(file):
                    total += file.stat().st_size
        return total / 2**20


@contextlib.contextmanager
def attacked_gateway(*, step_s: float = STEP_S, **settings: object) -> Iterator[AttackedGateway]:
    """Start a gateway process, wait until it serves, and end it on exit."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", __name__, str(port), str(step_s), json.dumps(settings)]
    process = subprocess.Popen(command, cwd=ROOT)
    gateway = AttackedGateway(process, port)
    try:
        deadline_s = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{gateway.url}/live", timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None, "the gateway's process has ended"
                assert time.monotonic() < deadline_s, "the gateway did not start in time"
                time.sleep(0.1)
        yield gateway
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_engine(pid: int) -> bool:
    return Path(attacked_engine.__file__).name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


class OneEngine:
    """A directory that lists one engine."""

    def __init__(self, record: EngineRecord) -> None:
        self._record = record

    async def watch(self, version: int) -> DirectorySnapshot:
        if version > 0:
            await asyncio.Event().wait()
        return DirectorySnapshot(1, [self._record], [])


@contextlib.contextmanager
def _engine(key: ClusterKey, model: ServedModel, step_s: float) -> Iterator[EngineRecord]:
    """Start an engine process, and end it on exit."""
    limits = {"num_blocks": 16_384, "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 8192}
    of_model = {"max_model_len": model.max_model_len, "vocab_size": model.vocab_size}
    config = {**limits, **of_model, "eos_token_ids": list(model.eos_token_ids)}
    command = [sys.executable, attacked_engine.__file__, key.to_bytes().decode(), json.dumps(config), str(step_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield EngineRecord(
            engine_id=attacked_engine.ENGINE_ID,
            group_id=attacked_engine.ENGINE_ID,
            epoch=attacked_engine.EPOCH,
            role=Role.UNIFIED,
            rank=0,
            node_id="node",
            node_ip="127.0.0.1",
            pid=process.pid,
            address=process.stdout.readline().strip(),
            kv_address="",
            fingerprint="f",
            model_id=model.model_id,
            max_model_len=model.max_model_len,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=limits["max_num_batched_tokens"],
            num_blocks=limits["num_blocks"],
        )  # leaving this block closes its input, which ends the process


async def _serve(port: int, step_s: float, settings: dict[str, object]) -> None:
    model, key = tiny_model(tiny_tokenizer(), MAX_MODEL_LEN), ClusterKey.generate()
    with _engine(key, model, step_s) as record:
        client = ZmqEngineClient(OneEngine(record), key, "gateway")
        await client.start()
        while not client.engines():
            await asyncio.sleep(0.01)
        drain = Drain()
        app = create_app(client, model, GatewaySettings(**settings), drain)
        server = HttpServer(app, drain, drain_s=0.0, drain_timeout_s=1.0)
        server.start(listen("127.0.0.1", port, share=False))
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
        await told.wait()
        await server.drain()
        await client.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])))
