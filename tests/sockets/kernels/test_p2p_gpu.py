"""Collectives over peer memory of two GPUs, a process per rank. test_p2p.py interprets them."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from baton.engine.parallel import Member
from baton.kernels.p2p import Op, PeerMemory
from baton.kernels.p2p.options import Algorithm

from ...helpers.member_pool import MemberPool, device_of
from .p2p_cases import (
    COLLECTIVES,
    TIMEOUT_S,
    WAYS,
    Way,
    inputs_of,
    num_left,
    replay_unevenly,
    share_memory,
    wait_in_vain,
)

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(2 * TIMEOUT_S)]

BLOCKS = (512, 1024, 2048, 4096)
ON_DEVICE = [Way(way.op, way.method, block) for way in WAYS for block in BLOCKS]
SIZES = (16, 2048, 4112, 64 * 4096, 200 * 4096 + 16)


def differences(member: Member, dtype: torch.dtype) -> list[str]:
    """Return the cases that differ from the reference; gathered values must have its bits."""
    memory, exchange = share_memory(member)
    wrong = []
    for number, size in enumerate(SIZES):
        inputs = [x.to(device_of(member), dtype) for x in inputs_of(size, member.world_size, number)]
        for way in ON_DEVICE:
            expected = way.expected(inputs)[member.rank]
            found = way.run(inputs[member.rank].clone(), memory)
            kind = torch.int16 if way.op is Op.ALL_GATHER else dtype
            if not torch.equal(found.view(kind), expected.view(kind)):
                wrong.append(f"{size} {way}")
    exchange("done")
    return wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_devices_results_are_those_of_the_definition(pool: MemberPool, dtype: torch.dtype) -> None:
    assert pool.run(differences, dtype, tp=2, device="cuda", timeout_s=TIMEOUT_S) == [[], []]


def uneven_replays(member: Member) -> tuple[int, int]:
    """Return the number of wrong values in replays of a graph, and of values left in this rank's memory."""
    device = device_of(member)
    memory, exchange = share_memory(member)
    cases = []
    for number, (size, way) in enumerate(itertools.product(SIZES, WAYS)):
        inputs = [x.to(device, torch.bfloat16) for x in inputs_of(size, member.world_size, 50 + number)]
        given = inputs[member.rank]
        by_block = Way(way.op, way.method, BLOCKS[number * 3 % 4])
        cases.append((by_block, given, torch.empty_like(given), way.expected(inputs)[member.rank]))
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def work() -> None:
        for way, given, x, expected in cases:
            x.copy_(given)
            found = way.run(x, memory)
            if found is not x:
                x.fill_(7.0)  # the input may be overwritten once the op has ended
            wrong.add_((found != expected).sum())

    replay_unevenly(member, work)
    exchange("done")
    return int(wrong), num_left(member, memory)


def test_on_devices_that_are_not_in_step_replays_are_right_and_leave_nothing_in_memory(pool: MemberPool) -> None:
    assert pool.run(uneven_replays, tp=2, device="cuda", timeout_s=TIMEOUT_S) == [(0, 0), (0, 0)]


def run_on(way: Way, memory: PeerMemory) -> None:
    way.run(torch.ones(4096, dtype=torch.bfloat16, device=memory.addresses.device), memory)


@pytest.mark.parametrize("op", COLLECTIVES)
def test_the_end_of_a_group_frees_a_device_that_waits_for_a_missing_peer(pool: MemberPool, op: Op) -> None:
    run = functools.partial(run_on, Way(op, Algorithm.ONE_SHOT, 1024))
    (waits, elapsed_s), _ = pool.run(wait_in_vain, run, tp=2, device="cuda", timeout_s=TIMEOUT_S)
    assert waits
    assert elapsed_s < 1.0
