"""Collectives over peer memory as part of a group. tests/sockets/kernels/test_p2p.py tests the kernels."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from baton.engine.parallel import Group, Member, ParallelGroups, collectives, symmetric
from baton.engine.parallel.groups import ExpertSpread
from baton.engine.parallel.rendezvous import RendezvousClient
from baton.engine.parallel.symmetric import SymmetricGroup, with_peer_memory
from baton.kernels.p2p import Op, PeerAccessError, PeerMemory

from ...helpers.member_pool import GROUP_TIMEOUT_S, MemberPool

CPU = torch.device("cpu")
COLLECTIVES = [Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER]


class Recorder(Group):
    """A group that records its calls."""

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

    def all_max(self, values: Any) -> list[int]:
        self.calls.append("all_max")
        return list(values)

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def group(recorder: Recorder) -> SymmetricGroup:
    return SymmetricGroup(recorder, PeerMemory(1, [0, 0], CPU, room_bytes=1 << 16))


def test_inputs_that_peer_memory_does_not_support_use_the_underlying_group(
    group: SymmetricGroup, recorder: Recorder
) -> None:
    x = torch.ones(4)
    assert group.all_reduce(x) is group.all_gather(x) is group.reduce_scatter(x) is group.all_to_all(x, [1, 3], [2, 2])
    assert group.all_max([3]) == [3]
    assert recorder.calls == ["all_reduce", "all_gather", "reduce_scatter", "all_to_all [1, 3] [2, 2]", "all_max"]
    assert (group.rank, group.size) == (1, 2)


@pytest.mark.parametrize("op", COLLECTIVES)
def test_inputs_that_peer_memory_supports_do_not_use_the_underlying_group(
    group: SymmetricGroup, recorder: Recorder, op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    supports = lambda asked, x, memory: asked is op and memory is group.memory  # noqa: E731
    monkeypatch.setattr(symmetric.p2p, "supports", supports)
    monkeypatch.setattr(symmetric.p2p, op.value, lambda x, memory: x.mul_(2))
    for each in COLLECTIVES:
        result = getattr(group, each.value)(torch.ones(2))
        assert result.tolist() == ([2, 2] if each is op else [1, 1])
    assert recorder.calls == [each.value for each in COLLECTIVES if each is not op]


def test_closing_a_group_ends_kernels_that_wait(group: SymmetricGroup, recorder: Recorder) -> None:
    group.close()
    assert group.memory.ended.item() == 1
    assert recorder.calls == ["close"]


def test_a_stub_launches_the_same_kernels_without_waiting(group: SymmetricGroup, recorder: Recorder) -> None:
    stub = ParallelGroups(tp=group).stubs()[0].tp
    assert isinstance(stub, SymmetricGroup)
    assert (stub.rank, stub.size, stub.memory.ended.item()) == (0, 2, 1)
    assert stub.all_gather(torch.ones(3, 2)).shape == (6, 2)
    assert not recorder.calls


def share_over_rendezvous(member: Member) -> Any:
    """Return each member's answers of two exchanges, and whether it gets its group back without peer memory."""
    told: list[list[str]] = []

    def share(rank: int, size: int, device: torch.device, exchange: Any) -> PeerMemory:
        told.extend([exchange(f"first of {rank}"), exchange(f"second of {rank}")])
        raise PeerAccessError("there is a wall")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric.PeerMemory, "share", share)
        rendezvous_client = RendezvousClient(member.rendezvous, member.rank, timeout_s=GROUP_TIMEOUT_S)
        group = type("Ranked", (Recorder,), {"rank": member.rank})()
        return told, with_peer_memory("tp/0", group, rendezvous_client, CPU) is group


@pytest.mark.slow
def test_members_exchange_strings_and_all_do_without_peer_memory_if_it_fails(pool: MemberPool) -> None:
    for told, is_same in pool.run(share_over_rendezvous, tp=2):
        assert told == [["first of 0", "first of 1"], ["second of 0", "second of 1"]]
        assert is_same


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_logs_why_there_is_no_peer_memory(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def share(*args: Any) -> PeerMemory:
        raise PeerAccessError("the ranks are on several machines")

    monkeypatch.setattr(symmetric.PeerMemory, "share", share)
    group = type("Ranked", (Recorder,), {"rank": rank})()
    with caplog.at_level(logging.INFO, logger=symmetric.__name__):
        assert with_peer_memory("tp/0", group, None, CPU) is group  # type: ignore[arg-type]
    assert [record.message.partition(": ")[2] for record in caplog.records] == (
        [] if rank else ["the ranks are on several machines"]
    )


class Here:
    """A fake rendezvous where all members are on this host."""

    def put(self, name: str, value: str) -> None:
        pass

    def get(self, name: str) -> str:
        return "127.0.0.1"


@pytest.mark.parametrize(
    ("tp", "dp", "spread", "names"),
    [
        (2, 1, False, ["tp/0"]),
        (2, 2, False, ["tp/0"]),
        (2, 1, True, ["tp/0"]),
        (1, 2, True, ["dp/0"]),
        (2, 2, True, ["tp/0", "dp/0"]),
    ],
)
@pytest.mark.parametrize(("device", "wanted"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_groups_of_gpus_that_sum_or_gather_use_peer_memory(
    tp: int, dp: int, spread: bool, names: list[str], device: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def take(name: str, group: Group, *_: Any) -> Group:
        taken.append(name)
        return group

    monkeypatch.setattr(collectives, "with_peer_memory", take)
    monkeypatch.setattr(collectives.GroupConnector, "connect", lambda *_: Recorder())
    member = Member(tensor_parallel_size=tp, data_parallel_size=dp)
    rendezvous_client: Any = Here()
    groups = collectives.connect_groups(
        member, rendezvous_client, torch.device(device), ExpertSpread() if spread else None, peer_memory=wanted
    )
    assert taken == (names if device == "cuda" and wanted else [])
    assert groups.widest.size == 2
