"""The placement of gateways and their ports, without Ray."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import ray

from baton.cluster.contracts import EngineRecord, LoadBalancing, Reach, Role
from baton.cluster.ingress import gateway_controller
from baton.cluster.ingress.gateway_controller import (
    UNLISTED_TIMEOUT_S,
    UNNEEDED_S,
    Action,
    PortAllocator,
    RunningGateway,
    decide_action,
    gateway_placements,
)
from baton.cluster.ingress.gateway_server import GatewayPlacement
from baton.cluster.spec import GatewaySpec

from ...helpers.fakes import make_gateway, make_record

DEMO = Path(__file__).parents[3] / "configs/demo/model"
ENGINES = [
    make_record(rank=0, role=Role.PREFILL, node="a"),
    make_record(rank=1, role=Role.DECODE, node="b"),
    make_record(rank=2, role=Role.DECODE, node="c"),
    make_record(rank=3, role=Role.UNIFIED, node="b"),
]


def reaches(mode: LoadBalancing, engines: list[EngineRecord]) -> list[tuple[str, Reach]]:
    return [(each.node_id, each.reach) for each in gateway_placements(mode, engines).values()]


def test_there_is_a_gateway_on_each_node_that_decodes() -> None:
    assert reaches(LoadBalancing.HYBRID, ENGINES) == [
        ("b", Reach(mode=LoadBalancing.HYBRID, node_id="b")),
        ("c", Reach(mode=LoadBalancing.HYBRID, node_id="c")),
    ]


def test_there_is_a_gateway_for_each_rank_that_decodes() -> None:
    assert reaches(LoadBalancing.EXTERNAL, ENGINES) == [
        ("b", Reach(mode=LoadBalancing.EXTERNAL, rank=1)),
        ("c", Reach(mode=LoadBalancing.EXTERNAL, rank=2)),
        ("b", Reach(mode=LoadBalancing.EXTERNAL, rank=3)),
    ]


def test_the_gateway_of_a_rank_moves_with_it_to_another_node() -> None:
    before = gateway_placements(LoadBalancing.EXTERNAL, [make_record(rank=1, node="b")])
    after = gateway_placements(LoadBalancing.EXTERNAL, [make_record(rank=1, node="c")])
    assert before.keys().isdisjoint(after)


def placement(rank: int, machine: str) -> GatewayPlacement:
    return GatewayPlacement(Reach(mode=LoadBalancing.EXTERNAL, rank=rank), f"node of {machine}", machine)


def test_gateways_of_one_machine_take_the_next_port_and_keep_it() -> None:
    ports = PortAllocator(8000)
    placements = [placement(0, "x"), placement(1, "x"), placement(2, "y")]
    assert [ports.port_of(each) for each in placements] == [8000, 8001, 8000]
    assert [ports.port_of(each) for each in reversed(placements)] == [8000, 8001, 8000]


def test_a_port_that_is_released_goes_to_the_next_gateway() -> None:
    ports = PortAllocator(8000)
    for rank in range(3):
        ports.port_of(placement(rank, "x"))
    ports.release(placement(1, "x"))
    assert ports.port_of(placement(7, "x")) == 8001
    assert ports.port_of(placement(1, "x")) == 8003


def test_existing_gateways_keep_their_ports() -> None:
    ports = PortAllocator(8000)
    ports.reserve(placement(1, "x"), 8000)
    assert ports.port_of(placement(0, "x")) == 8001
    assert ports.port_of(placement(1, "x")) == 8000


def gateway(application: str = "now", needed_at_s: float = 0.0) -> RunningGateway:
    nobody: Any = None
    record = msgspec.structs.replace(make_gateway("g"), application=application)
    return RunningGateway(nobody, record, nobody, needed_at_s)


@pytest.mark.parametrize(
    ("there", "needed", "now_s", "action"),
    [
        (None, True, 0.0, Action.START),
        (None, False, 0.0, Action.FORGET),
        (gateway(), True, 0.0, Action.NOTHING),
        (gateway(), False, UNNEEDED_S - 1, Action.NOTHING),
        (gateway(), False, UNNEEDED_S + 1, Action.END),
        (gateway("before"), True, 0.0, Action.REPLACE),
        (gateway("before"), False, 0.0, Action.END),
    ],
)
def test_a_placement_is_kept_while_it_is_needed_and_for_a_while(
    there: RunningGateway | None, needed: bool, now_s: float, action: Action
) -> None:
    assert decide_action(there, needed=needed, application="now", now_s=now_s) is action


def test_a_running_gateway_that_is_unlisted_for_long_counts_as_ended() -> None:
    with closing(asyncio.new_event_loop()) as loop:
        hanging = RunningGateway(Any, make_gateway("g"), loop.create_future())
    hanging.update_listing({"g"}, now_s=0.0)
    assert not hanging.has_ended(UNLISTED_TIMEOUT_S + 1), "the gateway is still listed"
    hanging.update_listing(set(), now_s=100.0)
    hanging.update_listing(set(), now_s=105.0)
    assert not hanging.has_ended(100.0 + UNLISTED_TIMEOUT_S)
    assert hanging.has_ended(101.0 + UNLISTED_TIMEOUT_S)
    hanging.update_listing({"g"}, now_s=120.0)
    assert not hanging.has_ended(200.0), "the gateway has registered again"


class Controller(gateway_controller.GatewayController):
    """A running controller of one gateway, whose `reconfigure` ends with `outcomes`, one by one."""

    def __init__(self, outcomes: list[Exception | None]) -> None:
        self.told: list[Any] = []
        self.ended = 0
        self._args = {"model": str(DEMO), "load_balancing": "hybrid", "fleets": {"unified": {}}}
        self._outcomes = outcomes
        self._changed = asyncio.Event()
        self._tasks = [asyncio.create_task(asyncio.sleep(60))]
        self._ports = PortAllocator(8000)
        self.placement = GatewayPlacement(Reach(mode=LoadBalancing.HYBRID, node_id="b"), "b", "127.0.0.1")
        self.started: list[Any] = []

    def __del__(self) -> None:  # type: ignore[override]
        """Do nothing: the base class's coroutine would never be awaited."""

    async def give(self, user_config: dict[str, Any]) -> None:
        await self.reconfigure(user_config)
        await self.reconcile()

    async def reconcile(self) -> None:
        await self._reconcile(self.placement, needed=True)

    @property
    def settings(self) -> GatewaySpec:
        """Return the settings that gateways start with."""
        return self._gateway

    async def has_gateway(self) -> None:
        await self.reconfigure({})
        actor: Any = SimpleNamespace(reconfigure=SimpleNamespace(remote=self._tell))
        record = msgspec.structs.replace(make_gateway("g"), application=self._version)
        self._gateways = {self.placement.name: RunningGateway(actor, record, asyncio.Future())}

    async def _tell(self, user_config: dict[str, Any]) -> None:
        self.told.append(user_config)
        if error := self._outcomes.pop(0) if self._outcomes else None:
            raise error

    async def _start(self, placement: GatewayPlacement) -> None:
        self.started.append(self._ports.port_of(placement))

    async def _end(self, gateway: RunningGateway) -> None:
        self._gateways.clear()
        self.ended += 1


LESS = {"gateway": {"max_inflight_requests": 7}}


async def test_running_gateways_get_new_settings_once() -> None:
    controller = Controller([])
    await controller.has_gateway()
    await controller.give({})
    assert controller.told == [{}], "a gateway of an earlier controller may have other settings"
    for _ in range(2):
        await controller.give(LESS)
    assert (controller.told, controller.ended) == ([{}, LESS], 0)


async def test_settings_are_sent_again_to_a_gateway_that_did_not_answer() -> None:
    controller = Controller([ray.exceptions.GetTimeoutError(), None])
    await controller.has_gateway()
    for _ in range(3):
        await controller.give(LESS)
    assert controller.told == [LESS, LESS]


async def test_wrong_settings_are_sent_once_and_do_not_become_the_controllers() -> None:
    controller = Controller([])
    await controller.has_gateway()
    await controller.give(LESS)
    await controller.give({"gateway": {"max_inflight_requests": 0}})
    assert controller.told == [LESS, {"gateway": {"max_inflight_requests": 0}}]
    controller.told.clear()
    await controller.reconcile()
    assert (controller.told, controller.settings.max_inflight_requests) == ([], 7)


@pytest.mark.parametrize("setting", [{"port": 9000}, {"host": "127.0.0.1"}, {"num_cpus": 1}, {"body_processes": 1}])
async def test_a_gateway_is_replaced_for_a_setting_that_it_cannot_change(setting: dict[str, Any]) -> None:
    controller = Controller([])
    await controller.has_gateway()
    await controller.give({"gateway": setting})
    assert (controller.ended, controller.told) == (1, [])
    assert controller.started == [setting.get("port", 8000)]


class SlowServer:
    """A gateway server that starts only once `opened` is set."""

    opened: asyncio.Event

    def __init__(self, *_: object, **__: object) -> None:
        self.record = make_gateway("g")

    async def start(self) -> None:
        await self.opened.wait()

    async def ended(self) -> None:
        await asyncio.sleep(3600)


async def test_a_gateway_that_is_listed_before_it_serves_does_not_count_as_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controller calls `run` as soon as the gateway is listed."""
    SlowServer.opened = asyncio.Event()
    monkeypatch.setattr(gateway_controller, "GatewayServer", SlowServer)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=None))
    actor = gateway_controller.GatewayActor(None)
    starting = asyncio.create_task(actor.start())
    await asyncio.sleep(0)
    running = asyncio.create_task(actor.run())
    await asyncio.sleep(0.05)
    assert not running.done()
    SlowServer.opened.set()
    assert (await starting).identity == "g"
    await asyncio.sleep(0.05)
    assert not running.done()
    running.cancel()
