"""A group that is asked to leave, and asked to stay: whichever comes when. Without Ray."""

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
from baton.cluster.engines.replica import EngineReplica
from baton.cluster.membership import directory_client, draining
from baton.cluster.membership.directory_client import DirectoryClient
from baton.cluster.membership.members import HeartbeatReply

from ...helpers.fakes import make_record

pytestmark = pytest.mark.timeout(60)

PATIENCE_S = 20.0


class Workers:
    """A group's processes, which have one request."""

    actor_names = ()

    def __init__(self) -> None:
        self.num_requests = 1
        self.has_returned_requests = False
        self.failure: ray.exceptions.RayError | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.has_stopped = self.has_ended = False

    async def pulses(self) -> list[EnginePulse]:
        await self.answers.wait()
        if self.failure is not None:
            raise self.failure
        return [EnginePulse(0.0, self.num_requests, 0, 0)]

    async def return_requests(self) -> None:
        self.has_returned_requests = True

    async def stop(self) -> None:
        self.has_stopped = True

    def kill(self) -> None:
        self.has_ended = True


class Directory:
    """Records the calls, in order. `register_group` is answered once `may_answer` is set."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.may_answer = asyncio.Event()
        self.num_lost = 0  # calls that are still to be lost with a link

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
    """A replica whose group has started, and the tasks that it would run, one by one."""

    def __init__(self, *, drain_timeout_s: float, directory: DirectoryClient | None = None) -> None:
        self.directory, self.workers = Directory(), Workers()
        self._directory = directory or self.directory  # type: ignore[assignment]
        self._workers = self.workers  # type: ignore[assignment]
        self._fleet = SimpleNamespace(drain_timeout_s=drain_timeout_s)  # type: ignore[assignment]
        self._group = EngineGroup(group_id="g", first_rank=0, engines=[make_record(engine_id="g")])
        self._end, self._is_ended_by_serve, self._leaving = "", False, None
        self.heart = self._heart = asyncio.create_task(asyncio.sleep(PATIENCE_S))
        self._tasks = [self._heart]

    def __del__(self) -> None:  # type: ignore[override]
        """Do nothing: no test awaits it."""

    @property
    def end(self) -> str:
        return self._end

    @property
    def is_draining(self) -> bool:
        assert self._group is not None
        return self._group.draining

    @property
    def is_leaving(self) -> bool:
        return self._leaving is not None

    def asked_to(self, reply: HeartbeatReply) -> None:
        """Follow what the directory says of the group."""
        self._follow_reply(reply)

    async def stands_still(self) -> None:
        await self._end_group("has made no progress")

    async def registers(self) -> None:
        await self._register()

    def starts(self, task: str) -> asyncio.Task[None]:
        """Run one of its tasks, and no other."""
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
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.005)


async def test_a_group_that_still_waits_for_its_requests_stays_when_it_is_asked_to() -> None:
    replica = Replica(drain_timeout_s=PATIENCE_S)
    replica.asked_to(HeartbeatReply.LEAVE)
    await until(lambda: ("drain", True) in replica.directory.told)
    replica.asked_to(HeartbeatReply.LISTED)
    await until(lambda: not replica.is_leaving)
    assert replica.directory.told == [("drain", True), ("drain", False)]
    assert not replica.workers.has_returned_requests
    assert not replica.is_draining
    assert not replica.end


async def test_a_group_that_stays_says_so_until_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways would never choose it again, though it lives and sends heartbeats."""
    monkeypatch.setattr(replicas, "RETRY_S", 0.01)
    replica = Replica(drain_timeout_s=PATIENCE_S)
    replica.asked_to(HeartbeatReply.LEAVE)
    await until(lambda: ("drain", True) in replica.directory.told)
    replica.directory.num_lost = 2
    replica.asked_to(HeartbeatReply.LISTED)
    await until(lambda: not replica.is_leaving)
    assert replica.directory.told == [("drain", True), ("drain", False)]


@pytest.mark.parametrize("task", ["watch", "report"])
async def test_a_group_that_cannot_be_watched_any_more_is_not_healthy(
    monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    """An error that a worker raises is no sign of its end: no other check would notice that it stands still."""
    monkeypatch.setattr(replicas, "PULSE_S", 0.01)
    replica = Replica(drain_timeout_s=PATIENCE_S)
    replica.workers.failure = ray.exceptions.RayTaskError("pulse", "somewhere", ValueError("what is this?"))
    await until(replica.starts(task).done)
    with pytest.raises(ray.exceptions.RayTaskError):
        await replica.check_health()


async def test_a_pulse_that_is_lost_with_a_link_does_not_end_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_group_that_returns_its_requests_leaves_though_it_is_asked_to_stay() -> None:
    """Its engines take no requests any more: it would be listed for good, and refuse them all."""
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
    replica.asked_to(HeartbeatReply.LEAVE)
    await until(lambda: ("drain", True) in replica.directory.told)
    replica.workers.failure = ray.exceptions.RayActorError()
    await until(replica.heart.done)
    assert replica.heart.cancelled()
    await until(lambda: ("leave", None) in replica.directory.told)


async def test_a_drain_that_begins_while_the_group_registers_is_not_forgotten() -> None:
    replica = Replica(drain_timeout_s=PATIENCE_S)
    registering = asyncio.create_task(replica.registers())
    await asyncio.sleep(0)
    replica.asked_to(HeartbeatReply.LEAVE)
    await until(lambda: ("drain", True) in replica.directory.told)
    replica.directory.may_answer.set()
    await registering
    assert replica.is_draining


async def test_a_group_that_stands_still_is_ended_though_its_link_to_the_directory_took_the_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its devices would be taken until Serve ends the replica by force."""

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
async def test_a_group_that_stands_still_while_it_drains_holds_nobody_up(asked_by: str) -> None:
    """Its engines never answer, and Ray waits for ever where that was lost with a link."""
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
