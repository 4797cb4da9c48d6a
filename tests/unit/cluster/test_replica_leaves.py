"""Groups that are asked to leave, and to stay, in any order and at any time. Without Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from baton.cluster.contracts import EngineGroup, EnginePulse
from baton.cluster.engines import replica as replicas
from baton.cluster.engines.registration import GroupRegistration
from baton.cluster.engines.replica import EngineReplica
from baton.cluster.membership import directory_client, draining
from baton.cluster.membership.directory_client import DirectoryClient
from baton.cluster.membership.members import HeartbeatReply

from ...helpers.fakes import make_record

pytestmark = pytest.mark.timeout(60)

PATIENCE_S = 20.0


class Workers:
    """A fake of a group's processes, which serve one request."""

    def __init__(self) -> None:
        self.num_requests = 1
        self.stalled_s = [0.0]  # of each engine
        self.has_returned_requests = False
        self.failure: ray.exceptions.RayError | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.has_stopped = self.has_ended = False

    async def pulses(self) -> list[EnginePulse]:
        await self.answers.wait()
        if self.failure is not None:
            raise self.failure
        return [EnginePulse(stalled_s, self.num_requests, 0, 0) for stalled_s in self.stalled_s]

    async def return_requests(self) -> None:
        self.has_returned_requests = True

    async def stop(self) -> None:
        self.has_stopped = True

    def kill(self) -> None:
        self.has_ended = True


class Directory:
    """A fake directory that records its calls in order. It answers `register_group` once `may_answer` is set."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.may_answer = asyncio.Event()
        self.num_lost = 0  # so many of the next calls fail

    async def call(self, method: str, *args: Any) -> Any:
        if method == "register_group":
            await self.may_answer.wait()
            return args[0]
        if self.num_lost:
            self.num_lost -= 1
            raise ray.exceptions.GetTimeoutError
        self.told.append((method, args[2] if method == "drain" else None))
        return None


class Replica(EngineReplica):
    """A replica whose group has started; a test runs its tasks one by one."""

    def __init__(self, *, drain_timeout_s: float, directory: DirectoryClient | None = None) -> None:
        self.directory, self.workers = Directory(), Workers()
        self._workers = self.workers  # type: ignore[assignment]
        self._fleet = SimpleNamespace(drain_timeout_s=drain_timeout_s)  # type: ignore[assignment]
        self._name = "engine group g"
        group = EngineGroup(group_id="g", first_rank=0, engines=[make_record(engine_id="g")])
        self._registration = GroupRegistration(directory or self.directory, group, [])  # type: ignore[arg-type]
        self._end, self._is_ended_by_serve, self._leaving = "", False, None
        self._tasks = []

    def __del__(self) -> None:  # type: ignore[override]
        """Do nothing: the base class's coroutine would never be awaited."""

    @property
    def end(self) -> str:
        return self._end

    @property
    def is_draining(self) -> bool:
        return self._registration.group.draining

    @property
    def is_leaving(self) -> bool:
        return self._leaving is not None

    def asked_to(self, reply: HeartbeatReply) -> None:
        """Handle a reply of the directory."""
        self._follow_reply(reply)

    async def stands_still(self) -> None:
        await self._end_group("has made no progress")

    async def registers(self) -> None:
        await self._registration.register()

    def sends_heartbeats(self) -> asyncio.Task[None]:
        return self._registration.start(lambda _: None)

    def starts(self, task: str) -> asyncio.Task[None]:
        """Start this task of the replica, and no other."""
        running = asyncio.create_task(self._watch_steps(PATIENCE_S) if task == "watch" else self._report())
        self._tasks = [running]
        return running


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "SETTLE_S", 0.01)
    monkeypatch.setattr(draining, "POLL_S", 0.01)
    monkeypatch.setattr(draining, "RETURN_S", PATIENCE_S)


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true in time"
        await asyncio.sleep(0.005)


async def test_a_draining_group_stays_if_it_is_asked_to_before_it_returns_requests() -> None:
    replica = Replica(drain_timeout_s=PATIENCE_S)
    replica.asked_to(HeartbeatReply.LEAVE)
    await until(lambda: ("drain", True) in replica.directory.told)
    replica.asked_to(HeartbeatReply.LISTED)
    await until(lambda: not replica.is_leaving)
    assert replica.directory.told == [("drain", True), ("drain", False)]
    assert not replica.workers.has_returned_requests
    assert not replica.is_draining
    assert not replica.end


async def test_a_group_that_stays_repeats_the_message_until_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the message is lost, gateways never choose the group again, although it is alive."""
    monkeypatch.setattr(replicas, "RETRY_S", 0.01)
    replica = Replica(drain_timeout_s=PATIENCE_S)
    replica.asked_to(HeartbeatReply.LEAVE)
    await until(lambda: ("drain", True) in replica.directory.told)
    replica.directory.num_lost = 2
    replica.asked_to(HeartbeatReply.LISTED)
    await until(lambda: not replica.is_leaving)
    assert replica.directory.told == [("drain", True), ("drain", False)]


@pytest.mark.parametrize("task", ["watch", "report"])
async def test_a_group_whose_monitoring_has_failed_is_not_healthy(monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    """A worker that raises an error has not ended: no other check would notice that the group makes no progress."""
    monkeypatch.setattr(replicas, "PULSE_S", 0.01)
    replica = Replica(drain_timeout_s=PATIENCE_S)
    replica.workers.failure = ray.exceptions.RayTaskError("pulse", "somewhere", ValueError("what is this?"))
    await until(replica.starts(task).done)
    with pytest.raises(ray.exceptions.RayTaskError):
        await replica.check_health()


async def test_a_lost_pulse_does_not_end_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "PULSE_S", 0.01)
    monkeypatch.setattr(replicas, "ANSWER_S", 0.05)
    replica = Replica(drain_timeout_s=PATIENCE_S)
    replica.workers.answers.clear()
    reports = replica.starts("report")
    await asyncio.sleep(0.02)
    lost, replica.workers.answers = replica.workers.answers, asyncio.Event()
    replica.workers.answers.set()
    await until(lambda: ("report_group", None) in replica.directory.told)
    assert not lost.is_set()
    reports.cancel()


async def test_a_group_that_has_returned_its_requests_leaves_even_if_asked_to_stay() -> None:
    """Its engines take no more requests: if it stayed, it would be listed and refuse every request."""
    replica = Replica(drain_timeout_s=0.01)
    replica.asked_to(HeartbeatReply.LEAVE)
    await until(lambda: replica.workers.has_returned_requests)
    replica.asked_to(HeartbeatReply.LISTED)
    replica.workers.num_requests = 0
    await until(lambda: replica.workers.has_stopped)
    assert replica.directory.told == [("drain", True), ("drained", None)]
    assert replica.end


async def test_a_group_that_dies_while_it_drains_does_not_register_again() -> None:
    replica = Replica(drain_timeout_s=PATIENCE_S)
    heartbeats = replica.sends_heartbeats()
    replica.asked_to(HeartbeatReply.LEAVE)
    await until(lambda: ("drain", True) in replica.directory.told)
    replica.workers.failure = ray.exceptions.RayActorError()
    await until(heartbeats.done)
    assert heartbeats.cancelled()
    await until(lambda: ("leave", None) in replica.directory.told)


async def test_a_drain_that_begins_during_registration_is_kept() -> None:
    replica = Replica(drain_timeout_s=PATIENCE_S)
    registering = asyncio.create_task(replica.registers())
    await asyncio.sleep(0)
    replica.asked_to(HeartbeatReply.LEAVE)
    await until(lambda: ("drain", True) in replica.directory.told)
    replica.directory.may_answer.set()
    await registering
    assert replica.is_draining


async def test_a_group_is_ended_once_if_one_of_its_engines_makes_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "PULSE_S", 0.001)
    replica = Replica(drain_timeout_s=PATIENCE_S)
    replica.workers.stalled_s = [0.0, PATIENCE_S + 1, 0.0]
    await asyncio.wait_for(replica.starts("watch"), PATIENCE_S)
    assert replica.directory.told == [("leave", None)]
    assert replica.workers.has_ended
    why = replica.end
    assert f"has made no progress for {PATIENCE_S + 1:.0f} s" in why
    await replica.stands_still()
    assert (replica.end, replica.directory.told) == (why, [("leave", None)]), "the first reason counts"


async def test_a_hanging_group_is_ended_even_if_the_directory_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would hold its devices until Serve kills the replica."""

    async def answered(*_: object) -> None:
        pass

    async def lost(*_: object) -> None:
        await asyncio.sleep(2 * PATIENCE_S)

    handle = SimpleNamespace(heartbeat=SimpleNamespace(remote=answered), leave=SimpleNamespace(remote=lost))
    monkeypatch.setattr(directory_client, "get_directory", lambda _: handle)
    monkeypatch.setattr(directory_client, "ANSWER_S", 0.05)
    directory = DirectoryClient("app")
    replica = Replica(drain_timeout_s=PATIENCE_S, directory=directory)
    await directory.call("heartbeat", "g", 1)
    ending = asyncio.create_task(replica.stands_still())
    await until(lambda: replica.workers.has_ended)
    await ending


@pytest.mark.parametrize("asked_by", ["the directory", "Serve"])
async def test_a_group_that_hangs_while_draining_is_ended_without_waiting(asked_by: str) -> None:
    """Its engines never answer, and after a lost link Ray waits for their answers for ever."""
    replica = Replica(drain_timeout_s=PATIENCE_S)
    replica.workers.answers.clear()
    if asked_by == "the directory":
        replica.asked_to(HeartbeatReply.LEAVE)
        await until(lambda: ("drain", True) in replica.directory.told)
        await replica.stands_still()
        await asyncio.wait_for(EngineReplica.__del__(replica), PATIENCE_S / 2)
    else:
        ending = asyncio.create_task(EngineReplica.__del__(replica))
        await until(lambda: ("drain", True) in replica.directory.told)
        await replica.stands_still()
        await asyncio.wait_for(ending, PATIENCE_S / 2)
    assert replica.workers.has_ended
    assert replica.end.endswith("has made no progress")
