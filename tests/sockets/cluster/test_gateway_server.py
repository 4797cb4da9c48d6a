"""A gateway's process applies a changed `user_config`: without Ray, and with a real application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from baton.cluster.contracts import DirectorySnapshot, QueueBound, Reach
from baton.cluster.gateway.app import create_app
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.cluster.gateway.middleware import Drain
from baton.cluster.gateway.model import ServedModel
from baton.cluster.ingress.gateway_server import GatewayLaunch, GatewayPlacement, GatewayServer, MustRestart
from baton.cluster.ingress.http_server import HttpServer
from baton.cluster.spec import FleetSpec

from ... import ROOT
from ...helpers.fakes import make_gateway

DEMO = ROOT / "configs/demo/model"
ARGS: dict[str, Any] = {
    "model": str(DEMO),
    "fleets": {"prefill": {}, "decode": {"min_replicas": 1, "max_replicas": 2}},
    "autoscaling": {"ttft_s": 2.0},
    "gateway": {"port": 8000, "max_inflight_requests": 10},
}


class Running(GatewayServer):
    """A started gateway process without its neighbours."""

    def __init__(self) -> None:
        self._launch = GatewayLaunch("a", ARGS, GatewayPlacement(Reach(), "node", "127.0.0.1"))
        self._spec = self._launch.spec({})
        self._changing = asyncio.Lock()
        self.record = make_gateway("g")
        client: Any = SimpleNamespace(engines=list, listed=lambda: DirectorySnapshot(1, [], []), queue=None)
        self._client = self.client = client
        self._metrics = GatewayMetrics("m", list)
        settings = self._spec.gateway.settings("g")
        self._app = create_app(client, ServedModel.from_folder(DEMO), settings, metrics=self._metrics)
        self._http = self.http = HttpServer(self._app, Drain(), drain_s=5.0, drain_timeout_s=30.0)

    @property
    def holds(self) -> Any:
        return self._app.state.parts.serving.settings

    @property
    def is_refused(self) -> bool:
        return b"baton_gateway_settings_refused 1.0" in self._metrics.render()


@pytest.fixture
async def gateway() -> Running:
    return Running()


async def test_settings_reach_each_part_of_the_process(gateway: Running) -> None:
    settings = {"max_inflight_requests": 3, "queue_limits": {"requests": 7}, "drain_s": 1.0, "drain_timeout_s": 2.0}
    await gateway.reconfigure({"gateway": settings, "autoscaling": {"ttft_s": 9.0}})
    assert gateway.holds.max_inflight_requests == 3
    assert gateway.client.queue == QueueBound(requests=7, tokens=4_000_000)
    assert (gateway.http.drain_s, gateway.http.drain_timeout_s) == (1.0, 2)
    assert gateway.record.scaling is not None
    assert gateway.record.scaling.ttft_s == 9.0
    await gateway.reconfigure({})
    assert gateway.holds.max_inflight_requests == 10, "what is gone from `user_config` is as in `args`"


@pytest.mark.parametrize(
    ("user_config", "said"),
    [
        ({"gateway": {"max_inflight_requests": 0, "max_choices": 1}}, "gateway.max_inflight_requests"),
        ({"gateway": {"max_inflight": 3, "max_choices": 1}}, "did you mean"),
        ({"gateway": {"api_keys_file": "/nowhere/keys", "max_choices": 1}}, "/nowhere/keys"),
        ({"gateway": {"max_choices": 1}, "fleets": {}}, "'fleets' cannot change while the application runs"),
        ({"gateway": {"max_choices": 1}, "autoscaling": {"ttft_s": -1}}, "autoscaling.ttft_s"),
    ],
)
async def test_wrong_settings_change_nothing_and_are_told(
    gateway: Running, caplog: pytest.LogCaptureFixture, user_config: dict[str, Any], said: str
) -> None:
    with caplog.at_level(logging.ERROR):
        await gateway.reconfigure(user_config)
    assert said in caplog.text
    assert gateway.is_refused
    assert gateway.holds.max_choices == 256
    await gateway.reconfigure({"gateway": {"max_choices": 1}})
    assert (gateway.is_refused, gateway.holds.max_choices) == (False, 1)


@pytest.mark.parametrize("setting", [{"port": 8001}, {"host": "127.0.0.1"}, {"body_processes": 3}])
async def test_what_a_gateway_keeps_from_its_start_on_takes_another_one(
    gateway: Running, setting: dict[str, Any]
) -> None:
    (name,) = setting
    with pytest.raises(MustRestart, match=name):
        await gateway.reconfigure({"gateway": setting | {"max_choices": 1}})
    assert gateway.holds.max_choices == 256
    assert not gateway.is_refused


async def test_the_log_names_what_changed_and_no_key(gateway: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await gateway.reconfigure({"gateway": {"api_keys": ["sk-secret"], "max_choices": 2}})
    assert "new settings are in effect: gateway.api_keys, gateway.max_choices" in caplog.text
    assert "sk-secret" not in caplog.text


async def test_a_change_waits_for_the_one_before(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last change wins, also if the first one took longer to check."""
    check = GatewayLaunch.spec
    released = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(launch: GatewayLaunch, user_config: Mapping[str, Any]) -> FleetSpec:
        if user_config["gateway"]["max_choices"] == 1:
            asyncio.run_coroutine_threadsafe(released.wait(), loop).result(10)
        return check(launch, user_config)

    monkeypatch.setattr(GatewayLaunch, "spec", slow)
    both = [asyncio.create_task(gateway.reconfigure({"gateway": {"max_choices": n}})) for n in (1, 2)]
    await asyncio.sleep(0.05)
    released.set()
    await asyncio.gather(*both)
    assert gateway.holds.max_choices == 2
