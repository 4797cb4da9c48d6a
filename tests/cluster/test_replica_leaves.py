"""A group that is asked to leave, and asked to stay: whichever comes when. Without Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from fakes import make_record

from baton.cluster.contracts import EngineGroup, EnginePulse
from baton.cluster.engines.replica import EngineReplica
from baton.cluster.membership import draining
from baton.cluster.membership.members import Standing

pytestmark = pytest.mark.timeout(60)

PATIENCE_S = 20.0


class Workers:
    """A group's processes, which have one request."""

    actors = ()

    def __init__(self) -> None:
        self.num_requests = 1
        self.has_handed_over = False
        self.is_dead = False
        self.has_stopped = False

    async def pulses(self) -> list[EnginePulse]:
        if self.is_dead:
            raise ray.exceptions.RayActorError
        return [EnginePulse(0.0, self.num_requests, 0, 0)]

    async def hand_over(self) -> None:
        self.has_handed_over = True

    async def stop(self) -> None:
        self.has_stopped = True

    def end(self) -> None:
        pass


class Directory:
    """What it was told, in order. `register_group` is answered once `may_answer` is set."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.may_answer = asyncio.Event()

    async def call(self, method: str, *args: Any) -> Any:
        if method == "register_group":
            await self.may_answer.wait()
            return args[0]
        self.told.append((method, args[2] if method == "drain" else None))
        return None


class Replica(EngineReplica):
    """One whose group has started."""

    def __init__(self, *, drain_timeout_s: float) -> None:
        self._directory, self._workers = Directory(), Workers()  # type: ignore[assignment]
        self._fleet = SimpleNamespace(drain_timeout_s=drain_timeout_s)  # type: ignore[assignment]
        self._group = EngineGroup(group_id="g", first_rank=0, engines=[make_record(engine_id="g")])
        self._end, self._is_ended_by_serve, self._leaving = "", False, None
        self._heart = asyncio.create_task(asyncio.sleep(PATIENCE_S))
        self._tasks = [self._heart]

    def __del__(self) -> None:  # type: ignore[override]
        """Nobody awaits it here."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "SETTLE_S", 0.01)
    monkeypatch.setattr(draining, "LOOK_S", 0.01)
    monkeypatch.setattr(draining, "LAST_WORDS_S", PATIENCE_S)


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.005)


async def test_a_group_that_still_waits_for_its_requests_stays_when_it_is_asked_to() -> None:
    replica = Replica(drain_timeout_s=PATIENCE_S)
    replica._stand(Standing.LEAVE)
    await until(lambda: ("drain", True) in replica._directory.told)
    replica._stand(Standing.LISTED)
    await until(lambda: replica._leaving is None)
    assert replica._directory.told == [("drain", True), ("drain", False)]
    assert not replica._workers.has_handed_over
    assert not replica._group.draining
    assert not replica._end


async def test_a_group_that_hands_its_requests_over_leaves_though_it_is_asked_to_stay() -> None:
    """Its engines take nothing any more: it would be listed for good, and refuse everyone."""
    replica = Replica(drain_timeout_s=0.01)
    replica._stand(Standing.LEAVE)
    await until(lambda: replica._workers.has_handed_over)
    replica._stand(Standing.LISTED)
    replica._workers.num_requests = 0
    await until(lambda: replica._workers.has_stopped)
    assert replica._directory.told == [("drain", True), ("drained", None)]
    assert replica._end


async def test_a_group_that_dies_while_it_drains_does_not_register_again() -> None:
    replica = Replica(drain_timeout_s=PATIENCE_S)
    replica._stand(Standing.LEAVE)
    await until(lambda: ("drain", True) in replica._directory.told)
    replica._workers.is_dead = True
    await until(replica._heart.done)
    assert replica._heart.cancelled()
    await until(lambda: ("leave", None) in replica._directory.told)


async def test_a_drain_that_begins_while_the_group_registers_is_not_forgotten() -> None:
    replica = Replica(drain_timeout_s=PATIENCE_S)
    registering = asyncio.create_task(replica._register())
    await asyncio.sleep(0)
    replica._stand(Standing.LEAVE)
    await until(lambda: ("drain", True) in replica._directory.told)
    replica._directory.may_answer.set()
    await registering
    assert replica._group.draining
