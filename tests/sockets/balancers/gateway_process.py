"""A process of one real gateway over a fake engine. SIGTERM drains it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

from baton.cluster.contracts import Role
from baton.cluster.gateway.app import create_app
from baton.cluster.gateway.middleware import Drain
from baton.cluster.gateway.settings import GatewaySettings
from baton.cluster.ingress.http_server import HttpServer, listen

from ...helpers.fake_cluster import FakeCluster
from ...helpers.process_context import FORKING
from ...helpers.tiny_model import MAX_MODEL_LEN, tiny_model, tiny_tokenizer

STEP_S = 0.01  # time of an engine's step: answers last long enough for events during them


def gateway_process(port: int, drain_s: float, log: Path) -> BaseProcess:
    """Start the process. Its output is appended to `log`."""
    process = FORKING.Process(target=_run, args=(port, drain_s, log), daemon=True)
    process.start()
    return process


def _run(port: int, drain_s: float, log: Path) -> None:
    with log.open("ab") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    asyncio.run(_serve(port, drain_s))


async def _serve(port: int, drain_s: float) -> None:
    model = tiny_model(tiny_tokenizer())
    cluster = FakeCluster(
        {},
        num_blocks=2048,
        max_num_seqs=128,
        max_num_batched_tokens=512,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=model.vocab_size,
        eos_token_ids=list(model.eos_token_ids),
    )
    cluster.start(Role.UNIFIED).step_s = STEP_S
    drain = Drain()
    app = create_app(cluster, model, GatewaySettings(gateway_id=f"gateway-{port}"), drain)
    server = HttpServer(app, drain, drain_s=drain_s, drain_timeout_s=20.0)
    server.start(listen("127.0.0.1", port, share=False))
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    await told.wait()
    await server.drain()
    await cluster.settled()  # waits until all requests of the gateway have ended
    await cluster.close()
