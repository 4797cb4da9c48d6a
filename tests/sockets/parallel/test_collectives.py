"""Collectives of a group: sums are right, and equal to the last bit on every rank."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from baton.engine.parallel import ALONE, Group, Member, ParallelGroups
from baton.engine.parallel.collectives import TorchGroup, connect_groups
from baton.engine.parallel.groups import CollectiveFailed, ExpertSpread
from baton.engine.parallel.rendezvous import RendezvousClient

from ...helpers.member_pool import MemberPool, device_of, groups_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (0, 1, 3, 64, 1001, 65536)
ON_GPUS = pytest.param(2, "cuda", marks=pytest.mark.gpu(2), id="two on GPUs")


def own(member: Member, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * member.rank + size)
    return (torch.randn(size, generator=generator) * 100).to(dtype)


def sums(member: Member) -> list[torch.Tensor]:
    device = device_of(member)
    with groups_of(member) as groups:
        totals = [groups.tp.all_reduce(own(member, size, dtype).to(device)) for dtype in DTYPES for size in SIZES]
        return [total.cpu() for total in totals]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "device"), [(2, "cpu"), (3, "cpu"), (4, "cpu"), ON_GPUS])
def test_sums_of_all_dtypes_and_sizes_have_equal_bits_on_every_rank(pool: MemberPool, ranks: int, device: str) -> None:
    first, *others = pool.run(sums, tp=ranks, device=device)
    for other in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, other, strict=True))
    members = [Member(rank=rank) for rank in range(ranks)]
    kinds = [(dtype, size) for dtype in DTYPES for size in SIZES]
    for total, (dtype, size) in zip(first, kinds, strict=True):
        parts = torch.stack([own(member, size, dtype).double() for member in members])
        error = (total.double() - parts.sum(0)).abs()
        assert (error <= ranks * torch.finfo(dtype).eps * parts.abs().sum(0)).all()


# How many of its three rows each rank sends to each rank.
SENT = {2: [[1, 2], [0, 3]], 3: [[1, 1, 1], [0, 2, 1], [1, 1, 1]]}


def exchange(member: Member) -> dict[str, Any]:
    rows = torch.arange(6.0, device=device_of(member)).view(3, 2) + 10 * member.rank
    with groups_of(member) as groups:
        tp = groups.tp
        sent = SENT[tp.size]
        received = [of_rank[member.rank] for of_rank in sent]
        return {
            "reduced": tp.all_reduce(rows.clone()).cpu(),
            "gathered": tp.all_gather(rows.T).cpu(),  # not contiguous
            "scattered": tp.reduce_scatter(rows.repeat(tp.size, 1)).cpu(),
            "mixed": tp.all_to_all(rows, sent[member.rank], received).cpu(),
            "largest": tp.all_max([member.rank, -member.rank, 2**40]),
            "smallest": tp.all_min([member.rank, -member.rank, 2**40]),
            "place": (tp.rank, tp.size),
        }


@pytest.mark.parametrize(("ranks", "device"), [(3, "cpu"), (2, "cpu"), ON_GPUS])
def test_every_collective_gives_its_defined_result(pool: MemberPool, ranks: int, device: str) -> None:
    results = pool.run(exchange, tp=ranks, device=device)
    rows = [torch.arange(6.0).view(3, 2) + 10 * rank for rank in range(ranks)]
    pieces = [part.split(sent) for part, sent in zip(rows, SENT[ranks], strict=True)]
    for rank, result in enumerate(results):
        assert torch.equal(result["reduced"], sum(rows, torch.zeros(3, 2)))
        assert torch.equal(result["gathered"], torch.cat([part.T for part in rows]))
        assert torch.equal(result["scattered"], sum(rows, torch.zeros(3, 2)))
        assert torch.equal(result["mixed"], torch.cat([of_rank[rank] for of_rank in pieces]))
        assert result["largest"] == [ranks - 1, 0, 2**40]
        assert result["smallest"] == [0, 1 - ranks, 2**40]
        assert result["place"] == (rank, ranks)


REPLAYS = 5


def replayed_sums(member: Member, peer_memory: bool) -> list[torch.Tensor]:
    """Return the results of replays of a captured chain of sums, each with other inputs."""
    device = device_of(member)
    with groups_of(member, peer_memory=peer_memory) as groups:
        return _replay(groups.tp, member, device)


def _replay(group: Group, member: Member, device: torch.device) -> list[torch.Tensor]:
    given = torch.zeros(4096, dtype=torch.bfloat16, device=device)
    x = torch.empty_like(given)

    def chain() -> None:
        x.copy_(given)
        group.all_reduce(x)
        x.add_(1.0)
        group.all_reduce(x)

    stream, graph, found = torch.cuda.Stream(device), torch.cuda.CUDAGraph(), []
    with torch.cuda.stream(stream):
        chain()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="relaxed")
        chain()
        graph.capture_end()
        for replay in range(REPLAYS):
            given.fill_(replay + 10.0 * member.rank)
            graph.replay()
            found.append(x.cpu())
    return found


@pytest.mark.gpu(2)
@pytest.mark.parametrize("peer_memory", [True, False], ids=["peer memory", "NCCL"])
def test_sums_in_a_captured_graph_are_those_of_each_replay(pool: MemberPool, peer_memory: bool) -> None:
    for results in pool.run(replayed_sums, peer_memory, tp=2, device="cuda"):
        for replay, result in enumerate(results):
            assert (result == 2 * (2 * replay + 10 + 1)).all()


def neighbours(member: Member, spread: bool) -> list[list[int]]:
    with groups_of(member, ExpertSpread() if spread else None) as groups:
        own_rank = torch.tensor([member.rank])
        return [group.all_gather(own_rank).tolist() for group in (groups.tp, groups.dp, groups.ep)]


def test_groups_have_the_ranks_of_their_dimension(pool: MemberPool) -> None:
    everyone = [0, 1, 2, 3]
    spread = pool.run(neighbours, True, tp=2, dp=2)
    assert spread == [
        [[0, 1], [0, 2], everyone],
        [[0, 1], [1, 3], everyone],
        [[2, 3], [0, 2], everyone],
        [[2, 3], [1, 3], everyone],
    ]
    assert pool.run(neighbours, True, tp=2) == [[[0, 1], [0], [0, 1]], [[0, 1], [1], [0, 1]]]
    assert pool.run(neighbours, True, dp=2) == [[[0], [0, 1], [0, 1]], [[1], [0, 1], [0, 1]]]


@pytest.mark.slow
def test_data_parallel_ranks_without_spread_experts_share_no_group(pool: MemberPool) -> None:
    first, second = [[0, 1], [0], [0]], [[0, 1], [1], [1]]
    third, fourth = [[2, 3], [2], [2]], [[2, 3], [3], [3]]
    assert pool.run(neighbours, False, tp=2, dp=2) == [first, second, third, fourth]


def threads_that_listen(member: Member) -> tuple[int, int]:
    """Count gloo's listening threads in this process, before it joins three groups and after."""

    def count() -> int:
        return sum(comm.read_text().startswith("gloo_tcp") for comm in Path("/proc/self/task").glob("*/comm"))

    before = count()
    with groups_of(member, ExpertSpread()) as groups:
        for group in (groups.tp, groups.dp, groups.widest):
            assert group is not None
            group.all_max([1])
        return before, count()


def test_one_thread_listens_for_all_groups_of_a_member(pool: MemberPool) -> None:
    """Each such thread wakes up eighty times a second, even in an idle engine."""
    for before, meanwhile in pool.run(threads_that_listen, tp=2, dp=2):
        assert meanwhile == before + 1


def test_an_address_that_cannot_be_bound_is_named() -> None:
    member, rendezvous_client = Member(tensor_parallel_size=2, host="192.0.2.7"), cast(RendezvousClient, Strangers())
    with pytest.raises(CollectiveFailed, match=r"192\.0\.2\.7"):
        connect_groups(member, rendezvous_client, torch.device("cpu"))


class Strangers:
    def put(self, name: str, value: str) -> None: ...

    def get(self, name: str) -> str:
        return "192.0.2.7"


def test_a_group_of_one_returns_its_inputs() -> None:
    x = torch.randn(3, 2)
    assert ALONE.all_reduce(x) is x
    for result in (ALONE.all_gather(x), ALONE.reduce_scatter(x), ALONE.all_to_all(x, [3], [3])):
        assert torch.equal(result, x)
    assert ALONE.all_max([3, -4]) == [3, -4]


METHODS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_max", "close")


@pytest.mark.parametrize("missing", METHODS)
def test_a_group_that_lacks_a_method_cannot_be_constructed(missing: str) -> None:
    methods = {name: lambda self: None for name in METHODS if name != missing}
    with pytest.raises(TypeError, match=missing):
        type("Half", (Group,), methods)()


def real_and_stub(member: Member) -> tuple[Any, Any]:
    with groups_of(member) as groups:
        sent, received = ([1, 3], [1, 2]) if member.rank == 0 else ([2, 2], [3, 2])
        x = torch.zeros(4, 3)
        real = [
            tuple(result.shape)
            for result in (
                groups.tp.all_gather(x),
                groups.tp.reduce_scatter(x),
                groups.tp.all_to_all(x, sent, received),
            )
        ]
        tp = groups.stubs()[member.rank].tp
        assert (tp.rank, tp.size) == (member.rank, 2)
        stub = [
            tuple(result.shape) for result in (tp.all_gather(x), tp.reduce_scatter(x), tp.all_to_all(x, sent, received))
        ]
    return real, stub


def test_stub_groups_give_results_of_the_same_shapes_without_waiting(pool: MemberPool) -> None:
    for real, stub in pool.run(real_and_stub, tp=2):
        assert real == stub


class _Counting(Group):
    rank, size = 0, 2
    closed = 0

    all_reduce = all_gather = reduce_scatter = all_to_all = functools.partialmethod(lambda self, *args: args[0])
    all_max = functools.partialmethod(lambda self, values: list(values))

    def close(self) -> None:
        self.closed += 1


def test_a_group_with_two_roles_is_closed_once() -> None:
    group = _Counting()
    ParallelGroups(tp=group, ep=group).close()
    assert group.closed == 1


class _HeldOpen:
    """Like NCCL's process group, whose abort waits until captured graphs are destroyed."""

    def __init__(self) -> None:
        self.aborting, self.steps_are_gone = threading.Event(), threading.Event()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def abort(self) -> None:
        self.aborting.set()
        assert self.steps_are_gone.wait(30)


def test_waiting_for_a_group_to_close_has_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    tensors, integers = _HeldOpen(), _HeldOpen()
    integers.steps_are_gone.set()
    group = TorchGroup(tensors, integers)
    group.close()
    assert tensors.aborting.wait(30)
    group.wait_closed(0.01)
    assert "has not ended" in caplog.text
    tensors.steps_are_gone.set()
    group.close()  # a second call does nothing
    caplog.clear()
    group.wait_closed(10)
    assert not caplog.text
