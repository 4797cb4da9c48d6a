"""Calls to the directory that get no answer because a network link fails. Without Ray: fakes replace its handles."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from baton.cluster.contracts import DirectorySnapshot
from baton.cluster.engine_client import ZmqEngineClient
from baton.cluster.membership import directory_client
from baton.cluster.membership.directory_client import DirectoryClient, stay_registered
from baton.cluster.membership.members import HeartbeatReply
from baton.engine.net.curve import ClusterKey

from ...helpers.fakes import make_record

pytestmark = pytest.mark.timeout(60)

PATIENCE_S = 20.0


class Handle:
    """A fake of the directory's actor handle. While `answers` is false, calls are never answered."""

    def __init__(self) -> None:
        self.answers = True
        self.asked: list[str] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *_: self._answer(method))

    async def _answer(self, method: str) -> Any:
        self.asked.append(method)
        if not self.answers:
            await asyncio.sleep(PATIENCE_S)
            raise AssertionError("the caller has waited without a limit")
        return HeartbeatReply.LISTED


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Handle:
    handle = Handle()
    monkeypatch.setattr(directory_client, "get_directory", lambda _: handle)
    monkeypatch.setattr(directory_client, "ANSWER_S", 0.05)
    return handle


@pytest.mark.parametrize("method", ["leave", "drain", "report_group", "application_lives"])
async def test_a_call_lost_with_its_link_ends_with_an_error(directory: Handle, method: str) -> None:
    watch = DirectoryClient("app")
    await watch.call("heartbeat", "g")
    directory.answers = False
    with pytest.raises(ray.exceptions.GetTimeoutError, match=r"silent for 0\.05 s"):
        await asyncio.wait_for(watch.call(method, "g"), PATIENCE_S / 2)


async def test_the_first_call_waits_longer_for_a_directory_that_is_starting(
    directory: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_client, "FIRST_ANSWER_S", 0.2)
    directory.answers = False
    with pytest.raises(ray.exceptions.GetTimeoutError, match=r"silent for 0\.2 s"):
        await DirectoryClient("app").call("cluster_key")


async def test_a_member_whose_heartbeat_is_lost_registers_again(directory: Handle) -> None:
    watch, registered = DirectoryClient("app"), asyncio.Semaphore(0)

    async def register() -> None:
        registered.release()
        directory.answers = True

    def cut_off(_: HeartbeatReply) -> None:
        directory.answers = False

    heart = asyncio.create_task(stay_registered(watch, "g", 1, register, on_reply=cut_off))
    async with asyncio.timeout(PATIENCE_S / 2):
        for _ in range(2):
            await registered.acquire()
    heart.cancel()


async def test_a_watcher_keeps_members_that_have_not_yet_registered_with_a_restarted_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = (make_record(engine_id=name, rank=rank) for rank, name in enumerate("ab"))
    answers = [
        DirectorySnapshot(1, [a, b], []),
        DirectorySnapshot(100, [], [], is_complete=False),
        DirectorySnapshot(101, [b], [], is_complete=False),
        DirectorySnapshot(102, [b], []),
    ]

    async def answer(version: int) -> DirectorySnapshot:
        return next(each for each in answers if each.version > version)

    handle = SimpleNamespace(watch=SimpleNamespace(remote=answer))
    monkeypatch.setattr(directory_client, "get_directory", lambda _: handle)
    watch = DirectoryClient("app")
    heard = [await watch.watch(version) for version in (-1, 1, 100, 101)]
    assert [(each.version, [record.engine_id for record in each.engines]) for each in heard] == [
        (1, ["a", "b"]),
        (100, ["a", "b"]),
        (101, ["a", "b"]),
        (102, ["b"]),
    ]


async def test_a_watch_without_news_returns_the_last_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def answer(version: int) -> DirectorySnapshot | None:
        asked.append(version)
        return None if version == 7 else DirectorySnapshot(7, [make_record(engine_id="a")], [])

    handle = SimpleNamespace(watch=SimpleNamespace(remote=answer))
    monkeypatch.setattr(directory_client, "get_directory", lambda _: handle)
    watch = DirectoryClient("app")
    first = await watch.watch(7)  # this client has seen no snapshot of that version
    assert await watch.watch(7) == first
    assert asked == [-1, 7]


async def test_snapshots_of_a_directory_whose_clock_is_behind_its_predecessors_are_applied() -> None:
    """A directory that restarts on another machine begins its versions at that machine's time."""

    class Nobody:
        async def watch(self, version: int) -> DirectorySnapshot:
            raise AssertionError("no watch was expected")

    client = ZmqEngineClient(Nobody(), ClusterKey.generate(), "g")
    client.apply(DirectorySnapshot(1000, [make_record(engine_id="a")], []))
    client.apply(DirectorySnapshot(400, [make_record(engine_id="b")], []))
    assert [record.engine_id for record in client.listed().engines] == ["b"]
    await client.close()


def test_the_helper_process_of_a_call_waits_no_longer_than_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each lost call would leave a process on the machine for ever."""
    waited: list[float] = []

    def get(_: object, *, timeout: float) -> None:
        waited.append(timeout)
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(
        ray, "get_actor", lambda *_: SimpleNamespace(watch=SimpleNamespace(remote=lambda version: version))
    )
    with pytest.raises(ray.exceptions.GetTimeoutError):
        directory_client.call_directory("app", 7.0, "watch", (1,))
    assert waited == [7.0]
