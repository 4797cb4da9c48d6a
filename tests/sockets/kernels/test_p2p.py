"""Collectives over peer memory, a process per rank. Kernels are interpreted, and files are the shared memory.

test_p2p_gpu.py runs them on devices.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.parallel import Member, ParallelGroups
from baton.engine.parallel.dispatch import GatherScatter, Served
from baton.engine.parallel.groups import StubGroup
from baton.engine.parallel.placement import ExpertPlacement
from baton.engine.parallel.symmetric import SymmetricGroup
from baton.kernels import p2p, tuned
from baton.kernels.expert_map import ExpertMap
from baton.kernels.p2p import Op, PeerMemory, RoutedTokens, measure, options, reference, supports
from baton.kernels.p2p.gpu import collectives
from baton.kernels.p2p.options import METHODS, Algorithm
from baton.kernels.p2p.peer_memory import CHANNELS, EMPTY, total_bytes

from ...helpers.aot import compile_for_h200
from ...helpers.member_pool import MemberPool
from .p2p_cases import COLLECTIVES, CPU, ROOM_BYTES, WAYS, Way, gpu, inputs_of, interpreted, make_files, map_memory

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]

each_way = pytest.mark.parametrize("way", WAYS, ids=str)


def test_the_definition_sums_in_float32_and_rounds_once() -> None:
    values = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert reference.all_reduce(values).item() == 258.0  # rounding twice would give 256


def test_the_definition_of_a_gather_keeps_all_bits_but_those_of_two_negative_zeros_in_a_word() -> None:
    given = torch.tensor([0x8000, 0x8000, 0x8000, 1, 1, 0x8000, 0x8000, 0x8000], dtype=torch.uint16).view(torch.half)
    found = reference.all_gather([given, given]).view(torch.uint16).tolist()
    assert found == [0, 0, 0x8000, 1, 1, 0x8000, 0, 0] * 2


def run_in_turn(
    member: Member, folder: Path, calls: list[tuple[Way, int]], most_programs: int, slow_rank: int
) -> tuple[list[Tensor], Any]:
    """Return this rank's result of each call, and how often each channel of its memory was used."""
    options.MOST_PROGRAMS = most_programs  # in this process
    files = [folder / str(rank) for rank in range(member.world_size)]
    memory = map_memory(member.rank, files)
    results = []
    for number, (way, size) in enumerate(calls):
        if member.rank == slow_rank:
            time.sleep(0.05 * (number % 3))
        x = inputs_of(size, member.world_size, number)[member.rank]
        results.append(way.run(x, memory))
    return results, memory.turns


def check(
    pool: MemberPool, folder: Path, ranks: int, calls: list[tuple[Way, int]], most_programs: int = CHANNELS
) -> None:
    """Check that each rank has the reference's result, up to the sign of zero sums, and that no values are left."""
    files = make_files(folder, ranks)
    answers = pool.run(run_in_turn, folder, calls, most_programs, ranks - 1, tp=ranks)
    for number, (way, size) in enumerate(calls):
        expected = way.expected(inputs_of(size, ranks, number))
        for (results, _), wanted in zip(answers, expected, strict=True):
            assert torch.equal(results[number], wanted), (number, str(way), size)
            if way.op is Op.ALL_GATHER:
                assert torch.equal(results[number].view(torch.int16), wanted.view(torch.int16)), (
                    "a gather must keep the bits of other dtypes, too"
                )
    assert all(torch.equal(turns, answers[0][1]) for _, turns in answers)
    for file in files:
        left = torch.from_file(str(file), shared=True, size=total_bytes(ROOM_BYTES) // 2, dtype=torch.int16)
        assert (left == EMPTY).all(), "values that were read must be cleared"


@interpreted
@each_way
@pytest.mark.parametrize("ranks", [2, 3])
def test_results_are_those_of_the_definition_if_ranks_are_not_in_step(
    pool: MemberPool, tmp_path: Path, ranks: int, way: Way
) -> None:
    sizes = [1, 5, 32, 1, 125, 1, 1, 65]  # so that programs run different numbers of times
    vector = 8 * ranks if way.op is Op.REDUCE_SCATTER else 8
    check(pool, tmp_path, ranks, [(way, size * vector) for size in sizes])


@interpreted
def test_ops_take_turns_in_one_memory(pool: MemberPool, tmp_path: Path) -> None:
    check(pool, tmp_path, 3, [(way, 24 * size) for size in (1, 6, 3) for way in (*WAYS, *reversed(WAYS))])


def dispatch_over_peers(member: Member, folder: Path) -> tuple[Served, Tensor]:
    """Return the tokens that reach this rank's experts, and the combine of (rank + 1) times their values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options.tuned, "config", lambda *_: {"method": 1, "BLOCK": 32})
        patch.setattr(p2p, "supports", gpu.supports)
        memory = map_memory(member.rank, [folder / str(rank) for rank in range(2)])
        group = SymmetricGroup(StubGroup(member.rank, 2), memory)  # a stub serves all but peer memory
        placement = ExpertPlacement.initial(4, 0, 2)
        table = ExpertMap.empty(4, placement.most_replicas, CPU)
        table.write(placement.replicas())
        dispatch = GatherScatter(ParallelGroups(dp=group, ep=group), placement)
        served = dispatch.prepare(RoutedTokens(*tokens_of(member.rank)), table, None)
        return served, dispatch.finalize(served.hidden * (member.rank + 1), served)


def tokens_of(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tokens with their experts and weights."""
    generator = torch.Generator().manual_seed(rank)
    hidden, weights = torch.randn(3, 32, generator=generator).half(), torch.rand(3, 3, generator=generator)
    ids = torch.tensor([[0, 1, 2], [3, 1, -1], [-1, -1, -1]], dtype=torch.int32)
    weights.view(torch.int16)[0, 0] = EMPTY  # half of a float32
    return hidden, ids, weights


@interpreted
def test_tokens_reach_experts_of_data_parallel_ranks_and_come_back_summed(pool: MemberPool, tmp_path: Path) -> None:
    make_files(tmp_path, 2)
    answers = pool.run(dispatch_over_peers, tmp_path, dp=2)
    hidden, _, weights = (torch.cat(each) for each in zip(tokens_of(0), tokens_of(1), strict=True))
    for rank, (served, back) in enumerate(answers):
        assert torch.equal(served.hidden, hidden)
        assert torch.equal(served.weights, weights)
        assert sorted(set(served.expert_ids.flatten().tolist())) == [-1, 0, 1]
        assert torch.equal(back, (tokens_of(rank)[0].float() * 3).half())


@interpreted
@each_way
def test_programs_take_several_blocks_if_there_are_more_than_programs(
    pool: MemberPool, tmp_path: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "MOST_PROGRAMS", 4)
    size = 4 * way.block * 2 + 16
    is_parted = way.op is Op.REDUCE_SCATTER or way.method is Algorithm.TWO_SHOTS
    assert options.programs_and_steps(way.op, way.method, way.block, (size,), 2) == (4, 2 if is_parted else 3)
    check(pool, tmp_path, 2, [(way, size)] * 2, most_programs=4)


@interpreted
@each_way
def test_kernels_stop_waiting_for_peers_once_the_group_has_ended(tmp_path: Path, way: Way) -> None:
    memory = map_memory(0, make_files(tmp_path, 2))
    threading.Timer(0.5, memory.end).start()
    begin = time.monotonic()
    way.run(torch.ones(64, dtype=torch.float16), memory)
    assert memory.ended.item() == 1
    assert time.monotonic() - begin > 0.4, "the kernel must wait until the group ends"


@interpreted
@each_way
def test_memory_without_peers_does_not_wait(way: Way) -> None:
    memory = PeerMemory.without_peers(1, 4, CPU, room_bytes=ROOM_BYTES)
    shape = {Op.ALL_REDUCE: (64, 2), Op.ALL_GATHER: (256, 2), Op.REDUCE_SCATTER: (16, 2)}[way.op]
    assert way.run(torch.ones(64, 2, dtype=torch.float16), memory).shape == shape


def test_inputs_that_do_not_fit_use_the_library() -> None:
    memory = PeerMemory(0, [0, 0], CPU, room_bytes=ROOM_BYTES)
    most = {Op.ALL_REDUCE: 256, Op.ALL_GATHER: 256, Op.REDUCE_SCATTER: 512}  # values per channel
    for op, values in most.items():
        way = Way(op)
        fits = torch.zeros(values * CHANNELS, dtype=torch.bfloat16)
        assert options.fitting_method(op, way.options, fits, memory) is Algorithm.ONE_SHOT
        too_many = torch.zeros(len(fits) + 16, dtype=torch.bfloat16)
        assert options.fitting_method(op, way.options, too_many, memory) is Algorithm.LIBRARY
        assert options.fitting_method(op, {**way.options, "method": 0}, fits, memory) is Algorithm.LIBRARY


@interpreted
@pytest.mark.parametrize("op", COLLECTIVES)
def test_inputs_other_than_whole_vectors_of_16_bit_values_are_refused(op: Op) -> None:
    memory, way = PeerMemory(0, [0, 0], CPU), Way(op)
    fits = torch.zeros(256 * CHANNELS, dtype=torch.bfloat16)
    assert options.fitting_method(op, way.options, fits[:64], memory) is Algorithm.ONE_SHOT
    others = [fits[:63], fits[4:68], fits[:0], fits[:64].float(), fits[:256].view(16, 16)[:, :8]]
    if op is Op.REDUCE_SCATTER:
        others += [fits[:24], fits[:48].view(3, 16)]  # each rank would not have whole vectors, or whole rows
    for x in others:
        assert not gpu.supports(op, x, memory)
        with pytest.raises(ValueError, match=f"{op.value}: .* not for the memory of peers"):
            way.run(x, memory)


@pytest.mark.parametrize("op", Op)
def test_tensors_of_a_cpu_are_not_served(op: Op) -> None:
    assert not supports(op, torch.zeros(64, dtype=torch.bfloat16), PeerMemory(0, [0, 0], CPU))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_untuned_sums_use_one_shot_then_two_shots_then_the_library_by_size(ranks: int) -> None:
    methods = [options.untuned(Op.ALL_REDUCE, ranks, 1 << bits)["method"] for bits in range(10, 28)]
    order = {Algorithm.ONE_SHOT: 0, Algorithm.TWO_SHOTS: 1, Algorithm.LIBRARY: 2}
    assert methods[0] is Algorithm.ONE_SHOT
    assert methods[-1] is Algorithm.LIBRARY
    assert [order[Algorithm(method)] for method in methods] == sorted(order[Algorithm(method)] for method in methods)
    assert (Algorithm.TWO_SHOTS in methods) == (ranks > 2)


def test_new_measurements_replace_only_those_of_the_same_op_and_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "device_name", lambda _: "NVIDIA_H200")
    known = [
        tuned.Entry(options.tuning_key(op, ranks, 4096), {"method": 1, "BLOCK": 512})
        for op, ranks in [(Op.ALL_REDUCE, 2), (Op.ALL_REDUCE, 4), (Op.ALL_GATHER, 4)]
    ]
    monkeypatch.setattr(measure, "entries", lambda *_: known)
    slow = measure.Times(
        Op.ALL_GATHER, 8192, {"library": 9.0}, [({"method": 1, "BLOCK": 512}, 3.0), ({"method": 1, "BLOCK": 1024}, 2.5)]
    )
    fast = measure.Times(Op.ALL_GATHER, 1 << 25, {"one": 2.8, "other": 2.0}, slow.by_options)
    again = measure.Times(Op.ALL_REDUCE, 4096, {"library": 9.0}, [({"method": 2, "BLOCK": 512}, 3.0)])
    written = measure.write(measure.entries_of([slow, fast], 2), CPU, tmp_path)
    found = json.loads(written.read_text())
    assert found[: len(known)] == [{"key": entry.key, "config": entry.config} for entry in known]
    assert [entry["config"] for entry in found[len(known) :]] == [
        {"method": 1, "BLOCK": 1024},
        {"method": 0, "BLOCK": 1024},
    ]
    found = json.loads(measure.write(measure.entries_of([again], 2), CPU, tmp_path).read_text())
    assert [entry["key"]["ranks"] for entry in found] == ["4", "4", "2"]
    assert found[-1]["config"]["method"] == 2


@pytest.mark.parametrize("op", [Op.ALL_GATHER, Op.REDUCE_SCATTER])
def test_ops_without_measurements_use_the_library(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, x = PeerMemory(0, [0, 0], CPU), torch.zeros(4096, dtype=torch.bfloat16)
    assert not gpu.supports(op, x, memory)
    sums_only = [tuned.Entry(options.tuning_key(Op.ALL_REDUCE, 2, 8192), {"method": 1, "BLOCK": 512})]
    assert tuned.nearest(sums_only, options.tuning_key(op, 2, 8192)) is None
    measured = [tuned.Entry(options.tuning_key(op, 2, 8192), {"method": 1, "BLOCK": 512})]
    assert tuned.nearest(measured, options.tuning_key(op, 2, 65536)) == measured[0]
    assert tuned.nearest(measured, options.tuning_key(op, 4, 8192)) is None, (
        "options of another number of ranks must not be used"
    )
    monkeypatch.setattr(options.tuned, "config", lambda *_: measured[0].config)
    assert gpu.supports(op, x, memory)


def test_tuned_options_are_for_these_kernels() -> None:
    files = list((tuned.LIBRARY / "p2p" / "tuned").glob("*.json"))
    assert files
    for path in files:
        for entry in tuned.entries("p2p", path.name.partition(".triton-")[0]):
            op = Op(str(entry.key["op"]))
            assert entry.key.keys() == options.tuning_key(op, 2, 8).keys()
            assert entry.config.keys() == options.untuned(op, 2, 8).keys()
            assert Algorithm(entry.config["method"]) in (Algorithm.LIBRARY, *METHODS[op])


KERNELS = [collectives.one_shot, collectives.two_shots, collectives.gather_parts, collectives.sum_own_part]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_values_move_16_bytes_at_a_time_and_bypass_l1(kernel: Any, ranks: int) -> None:
    outputs = {name: "*bf16" for name in ("gathered", "total") if name in kernel.arg_names}
    pointers = {"x": "*bf16", **outputs, "addresses": "*i64", "turns": "*i32", "ended": "*i32"}
    numbers = dict.fromkeys(("num_vectors", "steps", "rank"), "i32")
    constants = {"RANKS": ranks, "ROOM": options.room(PeerMemory(0, [0], CPU)), "BLOCK": 1024}
    compiled = compile_for_h200(kernel, {**pointers, **numbers}, constants, max_spill_bytes=8, num_warps=4)
    assert "ld.volatile.global.v4" in compiled.ptx
    assert "st.global.b16" not in compiled.ptx
    assert compiled.ptx.count("st.global.b32") == 1, "only the count of turns may be stored alone"
    assert "griddepcontrol.wait" in compiled.ptx
