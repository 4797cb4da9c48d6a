"""Dispatch and combine between GPUs with peer memory, a process per rank. test_p2p_dispatch.py interprets them."""

from __future__ import annotations

import functools

import pytest
import torch

from baton.engine.parallel import Member
from baton.kernels.p2p import Op, PeerMemory
from baton.kernels.p2p.options import Algorithm

from ...helpers.member_pool import MemberPool, device_of
from .dispatch_cases import Exchange, Load, differences, partial_of
from .p2p_cases import TIMEOUT_S, gpu, num_left, replay_unevenly, share_memory, wait_in_vain

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(2 * TIMEOUT_S)]

BLOCKS = (512, 1024, 2048, 4096)
EXCHANGES = [
    *(Exchange(load, 7, hidden_size=2048, seed=seed) for seed, load in enumerate(Load)),
    Exchange(Load.RANDOM, 1, hidden_size=2048),
    Exchange(Load.RANDOM, 256, hidden_size=2048, replicas=8),
    Exchange(Load.PADDED, 100, hidden_size=2880, replicas=8),
    Exchange(Load.RANDOM, 33, hidden_size=520),
]
each_number_of_ranks = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.gpu(4))])


def wrong_exchanges(member: Member, dtype: torch.dtype) -> list[str]:
    """Return differences from the reference, and of the bits of sums from those of `reduce_scatter`."""
    device, size = device_of(member), member.world_size
    memory, exchange_words = share_memory(member)
    wrong = []
    for exchange in EXCHANGES:
        brought, back, _ = exchange.expected(size, dtype, device)
        for block in BLOCKS:
            found = exchange.run(member.rank, memory, dtype, block)
            differ = differences(found, (brought[member.rank], back[member.rank]))
            partial = partial_of(brought[member.rank], member.rank).nan_to_num()
            options = {"method": Algorithm.ONE_SHOT, "BLOCK": block}
            scattered = gpu.reduce_scatter(partial, memory, options)
            if not torch.equal(scattered.view(torch.int16), found[1].view(torch.int16)):
                differ.append("bits of the sums")
            wrong += [f"{exchange}, blocks of {block}: {what}" for what in differ]
    exchange_words("done")
    return wrong


@each_number_of_ranks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_devices_tokens_are_exchanged_as_defined(pool: MemberPool, ranks: int, dtype: torch.dtype) -> None:
    found = pool.run(wrong_exchanges, dtype, tp=ranks, device="cuda", timeout_s=TIMEOUT_S)
    assert found == [[]] * ranks


def uneven_exchanges(member: Member) -> tuple[int, int]:
    """Return the number of wrong values in replays of a graph, and of values left in this rank's memory."""
    device, size, dtype = device_of(member), member.world_size, torch.bfloat16
    memory, exchange_words = share_memory(member)
    cases = []
    for number, exchange in enumerate(EXCHANGES):
        brought, back, _ = exchange.expected(size, dtype, device)
        given, table = exchange.given(member.rank, size, dtype, device), exchange.table(size, device)
        options = {"method": Algorithm.ONE_SHOT, "BLOCK": BLOCKS[number % len(BLOCKS)]}
        cases.append((exchange.places(size), given, table, options, brought[member.rank], back[member.rank]))
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def work() -> None:
        for places, given, table, options, brought, back in cases:
            found = gpu.dispatch(given, table, places, memory, options)
            came = brought.visits[0].view(-1, 1) != 0
            rows = found.hidden.masked_fill(~came, 0.0)
            partial = torch.where(came, rows * (member.rank + 1), float("nan"))
            summed = gpu.combine(partial, found.visits, memory, options)
            found.hidden.fill_(7.0)  # the result may be overwritten once the op has ended
            for ours, wanted in ((rows, brought.hidden), (found.expert_ids, brought.expert_ids), (summed, back)):
                wrong.add_((ours != wanted).sum())

    replay_unevenly(member, work)
    exchange_words("done")
    return int(wrong), num_left(member, memory)


@each_number_of_ranks
def test_on_devices_that_are_not_in_step_tokens_are_right_and_none_is_left_in_memory(
    pool: MemberPool, ranks: int
) -> None:
    found = pool.run(uneven_exchanges, tp=ranks, device="cuda", timeout_s=TIMEOUT_S)
    assert found == [(0, 0)] * ranks


def run_one(op: Op, memory: PeerMemory) -> None:
    device, exchange = memory.addresses.device, Exchange(Load.RANDOM, 4, hidden_size=2048)
    options = {"method": Algorithm.ONE_SHOT, "BLOCK": 1024}
    if op is Op.DISPATCH:
        given = exchange.given(0, 2, torch.bfloat16, device)
        gpu.dispatch(given, exchange.table(2, device), exchange.places(2), memory, options)
    else:
        visits = torch.ones(2, 2, 4, dtype=torch.int32, device=device)
        gpu.combine(torch.ones(8, 2048, dtype=torch.bfloat16, device=device), visits, memory, options)


@pytest.mark.parametrize("op", [Op.DISPATCH, Op.COMBINE])
def test_the_end_of_a_group_frees_a_device_that_waits_for_missing_tokens(pool: MemberPool, op: Op) -> None:
    run = functools.partial(run_one, op)
    (waits, elapsed_s), _ = pool.run(wait_in_vain, run, tp=2, device="cuda", timeout_s=TIMEOUT_S)
    assert waits
    assert elapsed_s < 1.0
