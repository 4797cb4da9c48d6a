"""The shipped balancer configurations, in real HAProxy, nginx and Envoy, in front of real gateways."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from baton.cluster.gateway.settings import GatewaySettings
from baton.cluster.ingress.http_server import KEEP_ALIVE_S

from ...helpers.balancer import (
    ALL_BALANCERS,
    BALANCERS,
    CONFIGS,
    ENVOY,
    HAPROXY,
    NGINX,
    Balancer,
    Load,
    answered_by,
    is_missing,
    running,
    wait_until_healthy,
)
from ...helpers.free_ports import free_port
from .gateway_process import gateway_process

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(120)]

CLIENTS = 12


class Setup:
    """A balancer and its gateways."""

    def __init__(self, balancer: Balancer, folder: Path, num_gateways: int) -> None:
        self.port, self.gateways = free_port(), [free_port() for _ in range(num_gateways)]
        self._balancer, self._folder = balancer, folder
        self._running = contextlib.ExitStack()
        self.processes: dict[int, BaseProcess] = {}

    def start(self) -> None:
        for port in self.gateways:
            self.start_gateway(port)
        file = self._balancer.configure(self._folder, self.port, self.gateways)
        self._running.enter_context(running(self._balancer.runs(file), self._folder / "balancer.log"))
        for port in (*self.gateways, self.port):
            wait_until_healthy(port)

    def start_gateway(self, port: int) -> None:
        process = gateway_process(port, self._balancer.drain_s, self._folder / f"gateway-{port}.log")
        self._running.callback(process.join)
        self._running.callback(process.kill)
        self.processes[port] = process

    def all_are_asked(self) -> bool:
        return all(answered_by(port) for port in self.gateways)

    def close(self) -> None:
        self._running.close()


def each_of(balancers: list[Balancer]) -> pytest.MarkDecorator:
    names = [Path(balancer.program).name for balancer in balancers]
    return pytest.mark.parametrize("balancer", balancers, indirect=True, ids=names)


@pytest.fixture(params=BALANCERS, ids=lambda balancer: balancer.program)
def balancer(request: pytest.FixtureRequest) -> Balancer:
    if is_missing(request.param.program):
        pytest.skip(f"{request.param.program} is not installed")
    return request.param


@pytest.fixture
def num_gateways() -> int:
    return 2


@pytest.fixture
def setup(balancer: Balancer, num_gateways: int, tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(balancer, tmp_path, num_gateways)
    try:
        setup.start()
        yield setup
    finally:
        setup.close()


async def eventually(condition: Callable[[], Any], timeout_s: float = 40.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.05)


@each_of(ALL_BALANCERS)
async def test_the_shipped_file_is_valid(balancer: Balancer, tmp_path: Path) -> None:
    file = Path(shutil.copy(CONFIGS / balancer.config, tmp_path))
    done = subprocess.run(balancer.checks(file), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


async def test_requests_are_spread_over_the_gateways(setup: Setup) -> None:
    """The check covers some time, as balancers rightly send less to a gateway that is delayed for a second."""
    async with Load(setup.port, CLIENTS, stream=True).under_way() as load:

        def are_even() -> bool:
            return load.answered > 4 * CLIENTS and min(map(answered_by, setup.gateways)) > load.answered / 4

        await eventually(are_even)
    assert load.failures == []


@each_of(ALL_BALANCERS)
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_gateway_that_is_stopped_and_restarted_under_load_loses_no_request(setup: Setup, stream: bool) -> None:
    leaver, stayer = setup.gateways
    async with Load(setup.port, CLIENTS, stream).under_way() as load:
        await eventually(lambda: answered_by(leaver) > CLIENTS)
        setup.processes[leaver].terminate()
        await eventually(lambda: not setup.processes[leaver].is_alive())
        assert setup.processes[leaver].exitcode == 0
        alone_from = load.answered
        await eventually(lambda: load.answered > alone_from + 2 * CLIENTS)
        setup.start_gateway(leaver)
        await asyncio.to_thread(wait_until_healthy, leaver)
        await eventually(lambda: answered_by(leaver) > CLIENTS)
    assert load.failures == []
    assert answered_by(stayer) > alone_from / 4


@each_of([dataclasses.replace(balancer, drain_s=60.0) for balancer in (HAPROXY, ENVOY)])
async def test_a_draining_gateway_gets_no_more_requests_although_its_port_is_open(setup: Setup) -> None:
    """nginx is not tested, as it has no active health checks."""
    leaver = setup.gateways[0]
    async with Load(setup.port, CLIENTS, stream=False).under_way() as load:
        await eventually(lambda: answered_by(leaver) > CLIENTS)
        setup.processes[leaver].terminate()

        async def asked_meanwhile() -> float:
            before, answered = await asyncio.to_thread(answered_by, leaver), load.answered
            await eventually(lambda: load.answered > answered + 4 * CLIENTS)
            return await asyncio.to_thread(answered_by, leaver) - before

        async with asyncio.timeout(30):
            while await asked_meanwhile():
                pass
    assert load.failures == []


@each_of(ALL_BALANCERS)
async def test_a_killed_gateway_loses_no_request_without_output(setup: Setup) -> None:
    assert await failures_without(setup, setup.gateways[:1]) == []


@each_of(ALL_BALANCERS)
@pytest.mark.parametrize("num_gateways", [4])
async def test_gateways_that_are_killed_at_once_lose_no_later_request(setup: Setup) -> None:
    """Requests arrive before the balancer's checks fail, and a request's tries may all go to dead gateways.

    The dead gateways also seem least busy. Requests in progress may be retried on each of them while it dies, and fail.
    """
    assert len(await failures_without(setup, setup.gateways[:3])) <= CLIENTS


async def failures_without(setup: Setup, gateways: list[int]) -> list[str]:
    """Return the clients' errors when these gateways are killed under load."""
    async with Load(setup.port, CLIENTS, stream=False, keep_alive=True).under_way() as load:
        await eventually(setup.all_are_asked)
        for port in gateways:
            setup.processes[port].kill()
        killed_at = load.answered
        await eventually(lambda: load.answered > killed_at + 3 * CLIENTS)
    return load.failures


@each_of(ALL_BALANCERS)
async def test_a_killed_gateway_loses_no_resumable_stream(setup: Setup) -> None:
    victim = setup.gateways[0]
    async with Load(setup.port, CLIENTS, stream=True, resumable=True).under_way() as load:
        await eventually(setup.all_are_asked)
        while not load.resumed:  # repeats only if the victim had no stream with output at that moment
            setup.processes[victim].kill()
            killed_at = load.answered
            await eventually(lambda killed_at=killed_at: load.answered > killed_at + 3 * CLIENTS)
            await asyncio.to_thread(setup.processes[victim].join)
            setup.start_gateway(victim)
            await asyncio.to_thread(wait_until_healthy, victim)
            await eventually(setup.all_are_asked)
    assert load.failures == []
    assert len(load.answers) == CLIENTS, "each client must get the same answer each time"


async def test_tokens_are_forwarded_without_buffering(setup: Setup) -> None:
    await check_tokens_come_one_by_one(setup)


@each_of([dataclasses.replace(NGINX, without="proxy_http_version 1.1;")])
@pytest.mark.parametrize("num_gateways", [1])
async def test_nginx_with_its_default_http_version_forwards_tokens_without_buffering(setup: Setup) -> None:
    """Without the option, nginx uses HTTP/1.0, except in new versions."""
    await check_tokens_come_one_by_one(setup)
    async with Load(setup.port, CLIENTS, stream=True).under_way() as load:
        await eventually(lambda: load.answered > 2 * CLIENTS)
    assert load.failures == []


async def check_tokens_come_one_by_one(setup: Setup) -> None:
    body = {"model": "tiny", "prompt": [5] * 40, "max_tokens": 60, "ignore_eos": True, "stream": True}
    arrivals = []
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{setup.port}") as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        async for chunk in response.aiter_raw():
            arrivals.append(time.perf_counter())
            assert chunk
    assert len(arrivals) > 4, "the balancer must not buffer tokens"
    assert arrivals[-1] - arrivals[0] > 0.1


def test_limits_of_envoy_fit_those_of_gateways() -> None:
    config = yaml.safe_load((CONFIGS / "envoy.yaml").read_text())["static_resources"]
    (listener,), (cluster,) = config["listeners"], config["clusters"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
    (options,) = cluster["typed_extension_protocol_options"].values()
    (check,) = cluster["health_checks"]
    checks_notice_s = check["unhealthy_threshold"] * (seconds_of(check["interval"]) + seconds_of(check["timeout"]))
    assert route["route"]["timeout"] == "0s"
    assert seconds_of(manager["stream_idle_timeout"]) > GatewaySettings().request_timeout_s
    assert seconds_of(options["common_http_protocol_options"]["idle_timeout"]) < KEEP_ALIVE_S
    assert seconds_of(check["interval"]) * check["unhealthy_threshold"] < GatewaySettings().drain_s
    assert check["no_traffic_interval"] == check["interval"]
    assert cluster["common_lb_config"]["healthy_panic_threshold"] == {"value": 0}, (
        "otherwise Envoy uses gateways that drain"
    )
    assert cluster["common_lb_config"]["update_merge_window"] == "0s", (
        "otherwise Envoy reacts to a check up to a second later"
    )
    assert seconds_of(cluster["outlier_detection"]["base_ejection_time"]) > checks_notice_s


def seconds_of(duration: str) -> float:
    return float(duration.rstrip("s"))


def test_continuous_integration_fails_without_a_balancer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert is_missing("a-program-that-nobody-has")
    assert not is_missing("sh")
    monkeypatch.setenv("CI", "true")
    assert not is_missing("a-program-that-nobody-has")
