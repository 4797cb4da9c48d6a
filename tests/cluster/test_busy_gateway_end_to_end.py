"""A gateway whose event loop, or whole interpreter, is blocked for longer than the directory waits for heartbeats."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.membership.member_probe import MISSED_AFTER_S

from .. import ROOT
from ..helpers.free_ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

DEMO = Path(__file__).parents[2] / "configs/demo/model"
APP = "busy"
START_S = 120.0
HELD_S = MISSED_AFTER_S + 2.0


def main(port: int) -> None:
    """Run a Ray cluster, a directory and one gateway in a process.

    Each line on stdin is a command, each line on stdout its result.
    """
    import ray

    from baton.cluster.contracts import Reach
    from baton.cluster.ingress.gateway_controller import GatewayActor
    from baton.cluster.ingress.gateway_server import GatewayLaunch, GatewayPlacement
    from baton.cluster.logs import LogSettings
    from baton.cluster.membership.directory import get_directory
    from baton.cluster.process_metrics import MetricsReader

    class Held(GatewayActor):
        async def hold(self, what: str, seconds: float) -> float:
            """Block the event loop, or the interpreter; return for how long it really was blocked."""
            began_s = time.monotonic()
            if what == "loop":
                time.sleep(seconds)
            else:
                ctypes.PyDLL(None).usleep(int(seconds * 1e6))
            return time.monotonic() - began_s

    ray.init("local", num_cpus=4, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)
    directory = get_directory(APP)
    args = {"model": str(DEMO), "fleets": {"unified": {"replicas": 1}}, "gateway": {"host": "127.0.0.1", "port": port}}
    placement = GatewayPlacement(Reach(), ray.get_runtime_context().get_node_id(), "127.0.0.1")
    launch = GatewayLaunch(APP, args, placement, port)
    actor: Any = ray.remote(Held).options(num_cpus=0, max_concurrency=10).remote(launch)
    record = ray.get(actor.start.remote())

    async def num_kept() -> float:
        """Return the directory's metric of silent members that it has kept."""
        key, snapshot = await directory.cluster_key.remote(LogSettings()), await directory.watch.remote(-1)
        with closing(MetricsReader(key)) as reader:
            families = {family.name: family for family in await reader.read(snapshot.metrics_address)}
        return float(families["baton_members_kept_total"].samples.split()[-1])

    async def versions_during(what: str, seconds: float) -> list[list[str]]:
        """Return each version of the directory's list of gateways while the gateway is blocked."""
        seen = []
        held = asyncio.ensure_future(actor.hold.remote(what, seconds))
        version = -1
        while True:
            asked = asyncio.ensure_future(directory.watch.remote(version))
            await asyncio.wait({asked, held}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                assert await held >= seconds
                return seen
            if (snapshot := await asked) is not None:
                version = snapshot.version
                seen.append([gateway.identity for gateway in snapshot.gateways])

    def keep_alive() -> None:
        """Keep the directory alive: it would end if it knew of no engine, and the gateway with it."""
        while True:
            directory.application_lives.remote()
            time.sleep(2.0)

    while not ray.get(directory.watch.remote(-1)).gateways:
        time.sleep(0.1)
    print(json.dumps([record.identity, record.pid]), flush=True)
    threading.Thread(target=keep_alive, daemon=True).start()
    for line in sys.stdin:
        what, seconds = json.loads(line)
        if what == "kept":
            print(json.dumps(asyncio.run(num_kept())), flush=True)
        elif what == "listed":
            snapshot = ray.get(directory.watch.remote(-1))
            print(json.dumps([gateway.identity for gateway in snapshot.gateways]), flush=True)
        else:
            print(json.dumps(asyncio.run(versions_during(what, seconds))), flush=True)
    ray.shutdown()


class Gateway:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(free_port())],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        )
        self.identity, self.pid = self._answer()

    def order(self, *words: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the cluster has ended"
        return json.loads(line)

    def close(self) -> None:
        from baton.cluster.cli.processes import descendants, kill

        below = descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        kill(below)


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.close()


def test_a_gateway_whose_event_loop_is_busy_goes_on_saying_that_it_lives(gateway: Gateway) -> None:
    seen = gateway.order("loop", HELD_S)
    assert seen == [[gateway.identity]] * len(seen)
    assert gateway.order("kept", 0) == 0, "nobody had to ask"


def test_a_gateway_whose_python_is_busy_is_asked_and_kept(gateway: Gateway) -> None:
    before = gateway.order("kept", 0)
    seen = gateway.order("python", HELD_S)
    assert seen == [[gateway.identity]] * len(seen)
    assert gateway.order("kept", 0) == before + 1, "kept once"


def test_a_gateway_that_is_stopped_is_not_kept(gateway: Gateway) -> None:
    os.kill(gateway.pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 60.0
        while gateway.order("listed", 0):
            assert time.monotonic() < deadline, "it is still listed"
            time.sleep(0.2)
    finally:
        os.kill(gateway.pid, signal.SIGCONT)


if __name__ == "__main__":
    main(int(sys.argv[1]))
