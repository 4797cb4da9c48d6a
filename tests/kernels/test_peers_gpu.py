"""Collectives over the memory of two GPUs that reach each other's, a process a rank. Interpreted: test_peers.py."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from member_pool import MemberPool, device_of
from peer_cases import WAYS, Way, inputs_of

from baton.engine.parallel import Member
from baton.engine.parallel.rendezvous import Meeting
from baton.kernels.peers import Op, PeerMemory
from baton.kernels.peers.memory import EMPTY, total_bytes
from baton.kernels.peers.options import Method

TIMEOUT_S = 150.0  # each process compiles, or waits for the other that does
pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(2 * TIMEOUT_S)]

BLOCKS = (512, 1024, 2048, 4096)
ON_DEVICE = [Way(way.op, way.method, block) for way in WAYS for block in BLOCKS]
SIZES = (16, 2048, 4112, 64 * 4096, 200 * 4096 + 16)
REPLAYS = 200


def exchange_of(member: Member, name: str) -> Callable[[str], list[str]]:
    meeting = Meeting(member.rendezvous, member.rank, timeout_s=TIMEOUT_S)
    numbers = itertools.count()

    def exchange(words: str) -> list[str]:
        number = next(numbers)
        meeting.put(f"{name}/{number}/{member.rank}", words)
        return [meeting.get(f"{name}/{number}/{rank}") for rank in range(member.world_size)]

    return exchange


def share_memory(member: Member) -> tuple[PeerMemory, Callable[[str], list[str]]]:
    torch.cuda.set_device(device_of(member))
    exchange = exchange_of(member, "peers")
    return PeerMemory.share(member.rank, member.world_size, device_of(member), exchange), exchange


def differences(member: Member, dtype: torch.dtype) -> list[str]:
    """What differs from the definition, in its bits where they are only brought."""
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
def test_on_devices_ranks_have_what_the_definition_says(pool: MemberPool, dtype: torch.dtype) -> None:
    assert pool.run(differences, dtype, tp=2, device="cuda", timeout_s=TIMEOUT_S) == [[], []]


def uneven_replays(member: Member) -> tuple[int, int]:
    """How many values were wrong in replays of a graph, and how many are left in this rank's memory."""
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
                x.fill_(7.0)  # what was given may be overwritten as soon as the op has ended
            wrong.add_((found != expected).sum())

    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="relaxed")
        work()
        graph.capture_end()
        for replay in range(REPLAYS):
            if replay % 5 == 3 * member.rank:
                torch.cuda._sleep(50_000)  # cycles: now this rank's device comes late, now the other's
            if replay % 50 == 10 * member.rank:
                time.sleep(0.002)
            graph.replay()
            if replay % 37 == 0:
                work()  # between replays, kernel by kernel
        stream.synchronize()
    exchange("done")
    mapping: Any = memory._keeps
    left = torch.frombuffer(mapping._memory[member.rank].read(0, total_bytes(memory.room_bytes)), dtype=torch.int16)
    return int(wrong), int((left != EMPTY).sum())


def test_on_devices_that_come_unevenly_replays_are_right_and_leave_nothing_behind(pool: MemberPool) -> None:
    assert pool.run(uneven_replays, tp=2, device="cuda", timeout_s=TIMEOUT_S) == [(0, 0), (0, 0)]


def wait_in_vain(member: Member, way: Way) -> tuple[bool, float]:
    """Whether rank 0 waits for the other, which does not come, and seconds until it has ended."""
    memory, exchange = share_memory(member)
    waits, elapsed_s = False, 0.0
    if member.rank == 0:
        x = torch.ones(4096, dtype=torch.bfloat16, device=device_of(member))
        way.run(x, PeerMemory.sketch(0, 2, x.device))  # compiles
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        way.run(x, memory)
        done.record()
        time.sleep(0.2)
        waits, begin = not done.query(), time.monotonic()
        memory.end()
        while not done.query() and time.monotonic() - begin < 10:
            time.sleep(0.001)
        elapsed_s = time.monotonic() - begin
    exchange("done")
    return waits, elapsed_s


@pytest.mark.parametrize("op", Op)
def test_a_device_that_waits_for_a_peer_in_vain_is_freed_by_the_end_of_the_group(pool: MemberPool, op: Op) -> None:
    way = Way(op, Method.ONE_SHOT, 1024)
    (waits, elapsed_s), _ = pool.run(wait_in_vain, way, tp=2, device="cuda", timeout_s=TIMEOUT_S)
    assert waits
    assert elapsed_s < 1.0
