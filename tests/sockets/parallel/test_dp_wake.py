"""Wakes reach every other rank, over Unix sockets and TCP. A rank that ends unexpectedly closes the others' groups."""

from __future__ import annotations

import queue
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.engine.core.step import Runner, StepPlan, StepResult
from baton.engine.net.curve import ClusterKey
from baton.engine.parallel import GroupFailed, Member, ParallelGroups
from baton.engine.parallel.mesh import Mesh
from baton.engine.parallel.rank_group import DPWake, RankGroup
from baton.engine.parallel.rendezvous import Rendezvous, RendezvousClient

from ...helpers.thread_groups import Closing, run_threads

SOON_S = 20.0
KEY = ClusterKey.generate()
SECURE = {"secure_server": KEY.secure_server, "secure_client": KEY.secure_client}
OTHER = ClusterKey.generate()


class End:
    """One rank's `DPWake`, and the waves that it received."""

    def __init__(self, rank: int, rendezvous: str, member: dict[str, Any]) -> None:
        self.group = Closing()
        self.heard: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.rendezvous = RendezvousClient(rendezvous, rank, timeout_s=SOON_S)
        self._member = Member(rank=rank, rendezvous=rendezvous, start_timeout_s=SOON_S, **member)

    def connect(self) -> None:
        self.rendezvous.put(f"here/{self._member.rank}", self._member.host)
        self.waves = DPWake(self._member, self.rendezvous, ParallelGroups(dp=self.group))
        self.waves.listen(self.heard.put)


@contextmanager
def ends(dp: int, *, tp: int = 1, apart: bool = False, **member: Any) -> Iterator[list[End]]:
    """Yield the ends of the data-parallel ranks. With `apart`, their addresses are those of different machines."""
    rendezvous = Rendezvous()
    sizes = {"data_parallel_size": dp, "tensor_parallel_size": tp}
    found = [
        End(rank * tp, rendezvous.address, {**sizes, **member, "host": f"127.0.0.{1 + apart * rank}"})
        for rank in range(dp)
    ]
    run_threads([end.connect for end in found], lambda: None)
    yield found
    for end in found:
        end.waves.close()


@pytest.mark.parametrize(
    ("apart", "member"), [(False, {}), (True, {}), (True, SECURE)], ids=["one host", "tcp", "curve"]
)
def test_a_wake_reaches_every_other_rank_in_order(apart: bool, member: dict[str, Any]) -> None:
    with ends(3, tp=2, apart=apart, **member) as (first, second, third):
        for wave in (0, 1, 2**40):
            first.waves.wake_others(wave)
        second.waves.wake_others(7)
        assert first.heard.get(timeout=SOON_S) == 7
        assert [second.heard.get(timeout=SOON_S) for _ in range(3)] == [0, 1, 2**40]
        heard = [third.heard.get(timeout=SOON_S) for _ in range(4)]
        heard.remove(7)  # this one is from another rank, so it may come at any time
        assert heard == [0, 1, 2**40]


def test_an_orderly_end_of_a_rank_is_no_failure_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ends(2) as (first, second):
        second.waves.close()
        assert not first.group.closed.wait(1.5)
    first.waves.close()  # a second call does nothing
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_a_rank_that_ends_unexpectedly_closes_the_groups_of_the_others(apart: bool) -> None:
    with ends(2, apart=apart) as (first, second):
        second.waves.close(orderly=False)
        assert first.group.closed.wait(SOON_S)
        with pytest.raises(GroupFailed, match="rank 1 has gone"):
            first.waves.wake_others(3)


class Device:
    """A runner whose steps return when groups are closed, like collectives that are aborted."""

    def __init__(self, closed: threading.Event) -> None:
        self.closed = closed

    def launch(self, plan: StepPlan) -> Any:
        device = self

        class Pending:
            def result(self) -> StepResult:
                assert device.closed.wait(SOON_S)
                return StepResult(plan.step, [])

        return Pending()


def test_a_step_that_another_rank_did_not_finish_gives_no_result() -> None:
    def runner(end: End, closed: threading.Event) -> Runner:
        rank_group = RankGroup(Member(), timeout_s=SOON_S)
        rank_group.dp_wake = end.waves
        return rank_group.leading(Device(closed))

    with ends(2) as (first, second):
        done = threading.Event()
        done.set()
        assert runner(first, done).launch(StepPlan(4, [], [], [])).result().step == 4
        step = runner(first, first.group.closed).launch(StepPlan(5, [], [], []))
        second.waves.close(orderly=False)
        with pytest.raises(GroupFailed, match="rank 1 has gone"):
            step.result()


def test_a_rank_whose_start_fails_closes_the_groups_of_the_others() -> None:
    """It must not count as an orderly end, as the others may wait for it in a collective."""
    with ends(2) as (first, second):
        rank_group = RankGroup(Member(), timeout_s=SOON_S)
        rank_group.dp_wake = second.waves
        with pytest.raises(ValueError, match="it does not fit"), rank_group.reporting_failure():
            raise ValueError("it does not fit")
        assert first.group.closed.wait(SOON_S)


def test_invalid_waves_are_dropped() -> None:
    rendezvous = Rendezvous()
    receiving, group = End(0, rendezvous.address, {"data_parallel_size": 2}), Closing()
    rendezvous_client = RendezvousClient(rendezvous.address, 1, timeout_s=SOON_S)
    sending = Member(rank=1, rendezvous=rendezvous.address, start_timeout_s=SOON_S, data_parallel_size=2)
    rendezvous_client.put("here/1", sending.host)
    connect = lambda: Mesh("waves", sending, rendezvous_client, ParallelGroups(dp=group), [0])  # noqa: E731
    _, mesh = run_threads([receiving.connect, connect], lambda: None)
    mesh.send(b"nonsense and more")
    mesh.send(struct.pack("<q", 5))
    assert receiving.heard.get(timeout=SOON_S) == 5
    receiving.waves.close()
    mesh.close(orderly=True)


def test_a_start_without_one_of_the_ranks_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rendezvous = Rendezvous()
    end = End(0, rendezvous.address, {"data_parallel_size": 2})
    end.rendezvous.put("here/1", "127.0.0.1")
    threading.Timer(0.2, lambda: rendezvous.fail(1, "it does not fit")).start()
    with pytest.raises(GroupFailed, match="it does not fit"):
        end.connect()
    assert list(tmp_path.iterdir()) == []


def test_ranks_with_different_keys_do_not_connect() -> None:
    rendezvous = Rendezvous()
    keys = (KEY, OTHER)
    found = [
        End(
            rank,
            rendezvous.address,
            {
                "data_parallel_size": 2,
                "host": f"127.0.0.{1 + rank}",
                "secure_server": keys[rank].secure_server,
                "secure_client": keys[rank].secure_client,
            },
        )
        for rank in range(2)
    ]
    begun = time.monotonic()
    with pytest.raises(GroupFailed, match="did not connect"):
        run_threads([end.connect for end in found], lambda: None)
    assert time.monotonic() - begun < 2 * SOON_S
