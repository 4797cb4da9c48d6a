"""Dispatch and combine over peer memory, a process per rank. test_p2p_dispatch_gpu.py runs them on devices."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.parallel import Member, ParallelGroups
from baton.engine.parallel.dispatch import Dispatches, ExpertDispatch, GatherScatter, OverPeers, Served
from baton.engine.parallel.groups import ALONE, ExpertSpread, StubGroup
from baton.engine.parallel.placement import ExpertPlacement
from baton.engine.parallel.symmetric import SymmetricGroup
from baton.kernels import p2p
from baton.kernels.p2p import Op, PeerMemory, RoutedTokens, measure, options, reference
from baton.kernels.p2p.gpu import dispatch_combine as tokens
from baton.kernels.p2p.options import MOST_CHOICES, Algorithm
from baton.kernels.p2p.peer_memory import CHANNELS, EMPTY, total_bytes

from ...helpers.aot import compile_for_h200
from ...helpers.member_pool import MemberPool
from .dispatch_cases import EXPERTS, Exchange, Load, differences
from .p2p_cases import CPU, ROOM_BYTES, gpu, interpreted, make_files, map_memory

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]

HALF = torch.float16
BLOCK = 64
TIMEOUT_S = 100.0  # four processes may have one core
UNEVEN = [
    Exchange(Load.RANDOM, 2),
    Exchange(Load.ONE_RANK, 2),
    Exchange(Load.NOT_ONE, 3, hidden_size=64),
    Exchange(Load.NOBODY, 2, hidden_size=8),
    Exchange(Load.PADDED, 2),
    Exchange(Load.RANDOM, 4, replicas=8, seed=1),
]


def test_the_definition_sends_a_row_to_the_ranks_of_its_experts_and_its_routing_to_all() -> None:
    ids = [torch.tensor([[0, -1, -1], [-1, -1, -1]]), torch.tensor([[0, 15, 7], [8, 9, 10]])]
    given = [
        RoutedTokens(torch.full((2, 8), 1.0 + rank).half(), each.int(), torch.ones(2, 3))
        for rank, each in enumerate(ids)
    ]
    exchange = Exchange(Load.RANDOM, 2)
    brought = reference.dispatch(given, exchange.table(2, CPU), exchange.places(2))
    assert [each.hidden[:, 0].tolist() for each in brought] == [[1, 0, 2, 0], [0, 0, 2, 2]]
    assert [each.expert_ids.tolist() for each in brought] == [
        [[0, -1, -1], [-1, -1, -1], [0, -1, 7], [-1, -1, -1]],
        [[-1, -1, -1], [-1, -1, -1], [-1, 7, -1], [0, 1, 2]],
    ]
    assert [each.visits.tolist() for each in brought] == [
        [[[1, 0], [1, 0]], [[1, 0], [0, 0]]],
        [[[0, 0], [1, 1]], [[1, 0], [1, 1]]],
    ]
    back = reference.combine([torch.ones(4, 8).half()] * 2, [each.visits for each in brought])
    assert [each[:, 0].tolist() for each in back] == [[1, 0], [2, 1]]


def exchange_in_turn(
    member: Member, folder: Path, exchanges: list[Exchange], most_programs: int, slow_rank: int
) -> tuple[list[tuple[Any, Tensor, Tensor]], Tensor]:
    """Return this rank's results of each exchange, and how often each channel of its memory was used."""
    options.MOST_PROGRAMS = most_programs  # in this process
    memory = map_memory(member.rank, [folder / str(rank) for rank in range(member.world_size)])
    results = []
    for number, exchange in enumerate(exchanges):
        if member.rank == slow_rank:
            time.sleep(0.05 * (number % 3))
        results.append(exchange.run(member.rank, memory, HALF, BLOCK))
    return results, memory.turns


def check(pool: MemberPool, folder: Path, ranks: int, exchanges: list[Exchange], most_programs: int = CHANNELS) -> None:
    """Check that each rank has the reference's result, that tokens are counted once, and that no values are left."""
    files = make_files(folder, ranks)
    answers = pool.run(exchange_in_turn, folder, exchanges, most_programs, ranks - 1, tp=ranks, timeout_s=TIMEOUT_S)
    for number, exchange in enumerate(exchanges):
        brought, back, loads = exchange.expected(ranks, HALF, CPU)
        found = [results[number] for results, _ in answers]
        for rank, ours in enumerate(found):
            assert not differences(ours, (brought[rank], back[rank])), (number, str(exchange), rank)
        assert torch.equal(sum((counted for *_, counted in found), torch.zeros_like(loads)), loads)
    assert all(torch.equal(turns, answers[0][1]) for _, turns in answers)
    for file in files:
        left = torch.from_file(str(file), shared=True, size=total_bytes(ROOM_BYTES) // 2, dtype=torch.int16)
        assert (left == EMPTY).all(), "values that were read must be cleared"


@interpreted
@pytest.mark.parametrize("ranks", [2, 4])
def test_uneven_loads_are_exchanged_as_defined_if_ranks_are_not_in_step(
    pool: MemberPool, tmp_path: Path, ranks: int
) -> None:
    check(pool, tmp_path, ranks, UNEVEN)


@interpreted
def test_programs_take_several_blocks_of_tokens_if_there_are_more_than_programs(
    pool: MemberPool, tmp_path: Path
) -> None:
    assert options.programs_and_steps(Op.DISPATCH, Algorithm.ONE_SHOT, BLOCK, (3, 72), 2) == (6, 1)
    exchanges = [Exchange(load, 3, seed=seed) for seed, load in enumerate((Load.RANDOM, Load.ONE_RANK, Load.PADDED))]
    check(pool, tmp_path, 2, exchanges, most_programs=4)


def exchange_both_ways(
    member: Member, folder: Path, exchanges: list[Exchange], column: int
) -> list[tuple[Served, Tensor, Tensor]]:
    """Return dispatched tokens, combined outputs and loads, of `OverPeers` and then of `GatherScatter`.

    The ranks are one of two tensor-parallel columns.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "MOST_PROGRAMS", CHANNELS)  # the process may have another value from an earlier test
        patch.setattr(options.tuned, "config", lambda *_: {"method": 1, "BLOCK": BLOCK})
        patch.setattr(p2p, "supports", gpu.supports)
        patch.setattr(p2p, "supports_dispatch", gpu.supports_dispatch)
        size = member.world_size
        group = SymmetricGroup(
            StubGroup(member.rank, size), map_memory(member.rank, [folder / str(rank) for rank in range(size)])
        )
        everyone = StubGroup(2 * member.rank + column, 2 * size)
        groups = ParallelGroups(StubGroup(column, 2), group, everyone, ExpertSpread())
        results = []
        for exchange in exchanges:
            placement = exchange.placement(2 * size)
            ways: list[ExpertDispatch] = [OverPeers(groups, placement, group), GatherScatter(groups, placement)]
            for way in ways:
                table = exchange.table(2 * size, CPU)
                given = exchange.given(member.rank, size, HALF, CPU)
                served = way.prepare(given, table, None)
                has_experts = (served.expert_ids >= 0).any(1, keepdim=True)
                partial = (served.hidden * (everyone.rank + 1)).masked_fill(~has_experts, 0.0)
                results.append((served, way.finalize(partial, served), table.loads))
        return results


@interpreted
@pytest.mark.parametrize("column", [0, 1])
def test_a_layer_gets_the_same_bits_as_from_gather_and_scatter(pool: MemberPool, tmp_path: Path, column: int) -> None:
    exchanges = [Exchange(Load.RANDOM, 5, hidden_size=128), Exchange(Load.PADDED, 4, hidden_size=128, replicas=8)]
    make_files(tmp_path, 2)
    for results in pool.run(exchange_both_ways, tmp_path, exchanges, column, dp=2):
        for (ours, back, counted), (theirs, wanted, wanted_counted) in zip(results[::2], results[1::2], strict=True):
            assert ours.visits is not None
            assert theirs.visits is None
            assert torch.equal(ours.expert_ids, theirs.expert_ids)
            assert torch.equal(ours.weights, theirs.weights)
            came = (theirs.expert_ids >= 0).any(1)
            assert 0 < came.sum() < len(came), "each rank must serve some tokens, and not all"
            assert torch.equal(ours.hidden[came].view(torch.int16), theirs.hidden[came].view(torch.int16))
            assert torch.equal(back.view(torch.int16), wanted.view(torch.int16))
            assert torch.equal(counted, wanted_counted)
            assert ours.num_own == theirs.num_own


@interpreted
@pytest.mark.parametrize("op", [Op.DISPATCH, Op.COMBINE])
def test_kernels_stop_waiting_for_tokens_once_the_group_has_ended(tmp_path: Path, op: Op) -> None:
    memory = map_memory(0, make_files(tmp_path, 2))
    threading.Timer(0.5, memory.end).start()
    begin = time.monotonic()
    run_one(op, memory)
    assert memory.ended.item() == 1
    assert time.monotonic() - begin > 0.4, "the kernel must wait until the group ends"


@interpreted
@pytest.mark.parametrize("op", [Op.DISPATCH, Op.COMBINE])
def test_memory_without_peers_does_not_wait_for_tokens(op: Op) -> None:
    memory = PeerMemory.without_peers(1, 4, CPU, room_bytes=ROOM_BYTES)
    assert run_one(op, memory).shape == ((16, 72) if op is Op.DISPATCH else (4, 72))


def run_one(op: Op, memory: PeerMemory) -> Tensor:
    exchange, way = Exchange(Load.RANDOM, 4), {"method": 1, "BLOCK": BLOCK}
    if op is Op.DISPATCH:
        given = exchange.given(memory.rank, memory.size, HALF, CPU)
        return gpu.dispatch(given, exchange.table(memory.size, CPU), exchange.places(memory.size), memory, way).hidden
    visits = torch.ones(2, memory.size, 4, dtype=torch.int32)
    return gpu.combine(torch.ones(memory.size * 4, 72, dtype=HALF), visits, memory, way)


def test_tokens_that_do_not_fit_use_the_library() -> None:
    memory = PeerMemory(0, [0, 0], CPU, room_bytes=ROOM_BYTES)  # 512 values per channel
    for op, most in ((Op.DISPATCH, 2), (Op.COMBINE, 4)):  # blocks; only dispatches have routing
        rows = most * CHANNELS * (2 if op is Op.COMBINE else 1)
        way = {"method": 1, "BLOCK": BLOCK}
        assert options.fitting_method(op, way, torch.zeros(rows, BLOCK).half(), memory) is Algorithm.ONE_SHOT
        assert options.fitting_method(op, way, torch.zeros(rows + 2, BLOCK).half(), memory) is Algorithm.LIBRARY
        assert (
            options.fitting_method(op, {**way, "method": 0}, torch.zeros(2, BLOCK).half(), memory) is Algorithm.LIBRARY
        )


def test_rows_that_are_no_whole_vectors_and_too_many_experts_per_token_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options.tuned, "config", lambda *_: {"method": 1, "BLOCK": BLOCK})
    memory, exchange = PeerMemory(0, [0, 0], CPU), Exchange(Load.RANDOM, 4)
    good = exchange.given(0, 2, HALF, CPU)
    assert gpu.supports_dispatch(good, memory)
    many = torch.zeros(4, MOST_CHOICES + 1)
    others = [
        (
            RoutedTokens(good.hidden[:, :12].contiguous(), good.expert_ids, good.weights),
            "is not for the memory of peers",
        ),
        (RoutedTokens(good.hidden[:, :8], good.expert_ids, good.weights), "is not for the memory of peers"),
        (RoutedTokens(good.hidden.float(), good.expert_ids, good.weights), "is not for the memory of peers"),
        (
            RoutedTokens(good.hidden, many.int(), many),
            f"dispatch: {MOST_CHOICES + 1} experts of a token: it takes up to",
        ),
    ]
    for tokens_, reason in others:
        assert not gpu.supports_dispatch(tokens_, memory)
        with pytest.raises(ValueError, match=reason):
            gpu.dispatch(tokens_, exchange.table(2, CPU), exchange.places(2), memory)
    with pytest.raises(ValueError, match="is not for the memory of peers"):
        gpu.combine(good.hidden[:3], torch.ones(2, 2, 2, dtype=torch.int32), memory)  # 3 rows for 2 ranks


def test_tokens_of_a_cpu_are_not_served() -> None:
    given = Exchange(Load.RANDOM, 4).given(0, 2, HALF, CPU)
    assert not p2p.supports_dispatch(given, PeerMemory(0, [0, 0], CPU))


def test_captured_steps_use_peer_memory_if_available_and_eager_ones_gather_all_tokens() -> None:
    placement = ExpertPlacement.initial(EXPERTS, 0, 2)
    group = SymmetricGroup(StubGroup(1, 2), PeerMemory(1, [0, 0], CPU, room_bytes=ROOM_BYTES))
    for dp, kind in ((group, OverPeers), (StubGroup(1, 2), GatherScatter)):
        dispatches = Dispatches.of(ParallelGroups(ALONE, dp, dp, ExpertSpread()), placement, "allgather_reducescatter")
        assert type(dispatches.captured) is kind
        assert type(dispatches.eager) is GatherScatter


def test_tokens_without_measurements_are_gathered_from_all_ranks() -> None:
    """There are no measurements for a CPU."""
    exchange, placement = Exchange(Load.RANDOM, 3), ExpertPlacement.initial(EXPERTS, 0, 2)
    group = SymmetricGroup(StubGroup(1, 2), PeerMemory(1, [0, 0], CPU, room_bytes=ROOM_BYTES))
    dispatch = OverPeers(ParallelGroups(ALONE, group, group, ExpertSpread()), placement, group)
    given = exchange.given(1, 2, HALF, CPU)
    served = dispatch.prepare(given, exchange.table(2, CPU), None)
    assert served.visits is None
    assert torch.equal(served.hidden, given.hidden.repeat(2, 1))
    assert dispatch.finalize(served.hidden, served).shape == given.hidden.shape


@interpreted
@pytest.mark.parametrize("op", Op)
def test_all_measured_methods_accept_the_same_inputs(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SIZES": (64, 128), "TOKENS": (1, 2), "BLOCKS": (64, 128), "HIDDEN": 64}.items():
        monkeypatch.setattr(measure, name, value)
    memory = PeerMemory.without_peers(1, 2, CPU)
    group = StubGroup(1, 2)
    library = {each: getattr(group, each.value) for each in (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER)}
    found = list(measure.cases_of(op, memory, CPU, library))
    smallest = {Op.DISPATCH: 128, Op.COMBINE: 256}.get(op, 64)
    assert [case.num_bytes for case in found] == [smallest, 2 * smallest]
    for case in found:
        assert [chosen["BLOCK"] for chosen, _ in case.by_options] == [64, 128] * len(options.METHODS[op])
        for run in (*case.otherwise.values(), *(run for _, run in case.by_options)):
            assert run(case.buffers[-1]) is not None


PLAIN = {"addresses": "*i64", "turns": "*i32", "ended": "*i32"}
NUMBERS = dict.fromkeys(("num_tokens", "rank"), "i32")
KERNELS: dict[Any, tuple[dict[str, str], dict[str, int]]] = {
    tokens.bring_tokens: (
        {
            **{"x": "*bf16", "expert_ids": "*i32", "weights": "*fp32", "places": "*i32", "counts": "*i32"},
            **{"loads": "*i64", "brought": "*bf16", "brought_ids": "*i32", "brought_weights": "*fp32"},
            **{"visits": "*i32", **PLAIN, **NUMBERS, "num_experts": "i32"},
            **{"first_place": "i32", "places_apart": "i32", "num_places": "i32"},
        },
        {"HIDDEN": 2048, "TOP_K": 8, "REPLICAS": 1},
    ),
    tokens.sum_tokens: ({"x": "*bf16", "total": "*bf16", "visits": "*i32", **PLAIN, **NUMBERS}, {"HIDDEN": 2048}),
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_move_16_bytes_at_a_time_and_bypass_l1(kernel: Any, ranks: int) -> None:
    signature, constants = KERNELS[kernel]
    layout = {"RANKS": ranks, "ROOM": options.room(PeerMemory(0, [0], CPU)), "BLOCK": 1024}
    compiled = compile_for_h200(kernel, signature, {**layout, **constants}, max_spill_bytes=8, num_warps=4)
    assert "ld.volatile.global.v4" in compiled.ptx
    assert "st.global.v4" in compiled.ptx
    assert "st.global.b16" not in compiled.ptx
    assert "griddepcontrol.wait" in compiled.ptx
