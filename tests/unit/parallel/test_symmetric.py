"""Sums over the memory of peers, as a group sees them. The kernels are tested in tests/kernels/test_all_reduce.py."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from member_pool import GROUP_TIMEOUT_S, MemberPool

from baton.engine.parallel import Group, Member, ParallelGroups, symmetric
from baton.engine.parallel.rendezvous import Meeting
from baton.engine.parallel.symmetric import SymmetricGroup, with_peer_memory
from baton.kernels.all_reduce import PeerMemory, PeersOutOfReach

CPU = torch.device("cpu")


class Recorder(Group):
    """Notes what it is asked for."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.calls: list[str] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("all_reduce")
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("all_gather")
        return x

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("reduce_scatter")
        return x

    def all_to_all(self, x: torch.Tensor, sent: Any, received: Any) -> torch.Tensor:
        self.calls.append(f"all_to_all {sent} {received}")
        return x

    def agree(self, values: Any) -> list[int]:
        self.calls.append("agree")
        return list(values)

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def group() -> SymmetricGroup:
    return SymmetricGroup(Recorder(), PeerMemory(1, [0, 0], CPU, room_bytes=1 << 16))


def calls(group: SymmetricGroup) -> list[str]:
    assert isinstance(group._group, Recorder)
    return group._group.calls


def test_what_peers_memory_does_not_serve_goes_the_groups_own_way(group: SymmetricGroup) -> None:
    x = torch.ones(4)
    assert group.all_reduce(x) is group.all_gather(x) is group.reduce_scatter(x) is group.all_to_all(x, [1, 3], [2, 2])
    assert group.agree([3]) == [3]
    assert calls(group) == ["all_reduce", "all_gather", "reduce_scatter", "all_to_all [1, 3] [2, 2]", "agree"]
    assert (group.rank, group.size) == (1, 2)


def test_what_it_serves_does_not(group: SymmetricGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "serves", lambda x, memory: memory is group._memory)
    monkeypatch.setattr(symmetric, "all_reduce", lambda x, memory: x.mul_(2))
    assert group.all_reduce(torch.ones(2)).tolist() == [2, 2]
    assert not calls(group)


def test_a_group_that_closes_ends_kernels_that_wait_before_it_leaves(group: SymmetricGroup) -> None:
    group.close()
    assert group._memory.ended.item() == 1
    assert calls(group) == ["close"]


def test_its_sketch_launches_the_same_kernels_and_waits_for_nobody(group: SymmetricGroup) -> None:
    sketch = ParallelGroups(tp=group).sketches()[0].tp
    assert isinstance(sketch, SymmetricGroup)
    assert (sketch.rank, sketch.size, sketch._memory.ended.item()) == (0, 2, 1)
    assert sketch.all_gather(torch.ones(3, 2)).shape == (6, 2)
    assert not calls(group)


def share_over_rendezvous(member: Member) -> Any:
    """What each member reads in two exchanges, and whether it has its group back where memory is out of reach."""
    told: list[list[str]] = []

    def share(rank: int, size: int, device: torch.device, exchange: Any) -> PeerMemory:
        told.extend([exchange(f"first of {rank}"), exchange(f"second of {rank}")])
        raise PeersOutOfReach("there is a wall")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric.PeerMemory, "share", share)
        meeting = Meeting(member.rendezvous, member.rank, timeout_s=GROUP_TIMEOUT_S)
        group = type("Ranked", (Recorder,), {"rank": member.rank})()
        return told, with_peer_memory("tp/0", group, meeting, CPU) is group


def test_members_exchange_what_they_need_and_agree_to_do_without(pool: MemberPool) -> None:
    for told, is_same in pool.run(share_over_rendezvous, tp=2):
        assert told == [["first of 0", "first of 1"], ["second of 0", "second of 1"]]
        assert is_same


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_says_that_sums_take_longer(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def share(*args: Any) -> PeerMemory:
        raise PeersOutOfReach("the ranks are on several machines")

    monkeypatch.setattr(symmetric.PeerMemory, "share", share)
    group = type("Ranked", (Recorder,), {"rank": rank})()
    with caplog.at_level(logging.INFO, logger=symmetric.__name__):
        assert with_peer_memory("tp/0", group, None, CPU) is group  # type: ignore[arg-type]
    assert [record.message.partition(": ")[2] for record in caplog.records] == (
        [] if rank else ["the ranks are on several machines"]
    )
