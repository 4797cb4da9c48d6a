"""Hand-offs between groups of processes, with each transport: each rank moves its own KV heads."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.engine.core.connector import BlocksReleased, OfferEnded, OfferOutcome, Received, ReceiveFailed
from baton.engine.core.layout import KVLayout
from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.connector import TransferSettings

from .engine_process import DEFAULT_SETTINGS, EngineProcess, RankProcess

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(180)]

HEADS = KVLayout(model="heads", num_layers=2, num_kv_heads=4, head_dim=32, dtype="bfloat16")
FEW_HEADS = KVLayout(model="few heads", num_layers=2, num_kv_heads=2, head_dim=32, dtype="float8_e4m3fn")
LATENTS = KVLayout(model="latents", num_layers=2, num_kv_heads=1, head_dim=48, dtype="bfloat16", num_planes=1)
QUICK = TransferSettings(lease_s=3.0, margin_s=0.2, retry_s=0.2, connect_s=2.0)
NUM_BLOCKS = 32
CASES = [
    (HEADS, (1, 2, 4), "nixl", "cpu"),
    (FEW_HEADS, (2, 4), "nixl", "cpu"),
    (LATENTS, (1, 2), "nixl", "cpu"),
    (HEADS, (1, 2, 4), "ucx", "cpu"),
    pytest.param((HEADS, (1, 2), "nixl", "cuda"), marks=pytest.mark.gpu(2)),
    pytest.param((LATENTS, (1, 2), "nixl", "cuda"), marks=pytest.mark.gpu(2)),
]

Start = Callable[..., EngineProcess]


@contextlib.contextmanager
def starting(transport: str) -> Iterator[Start]:
    key, running = ClusterKey.generate(), []

    def start_one(
        name: str, layout: KVLayout, settings: TransferSettings = DEFAULT_SETTINGS, **options: object
    ) -> EngineProcess:
        settings = settings.model_copy(update={"transport": transport})
        options = {"num_blocks": NUM_BLOCKS, "settings": settings, **options}
        running.append(EngineProcess(name, key, layout, **options))
        return running[-1]

    try:
        yield start_one
    finally:
        for engine in running:
            engine.kill()


@pytest.fixture(params=["nixl", "ucx"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    with starting(request.param) as start_one:
        yield start_one


@pytest.fixture(scope="module", params=CASES, ids=lambda case: ", ".join([case[0].model, *case[2:]]))
def engines(request: pytest.FixtureRequest) -> Iterator[dict[int, EngineProcess]]:
    """Engines of each size, all connected to each other."""
    layout, sizes, transport, device = request.param
    with starting(transport) as start_one:
        engines = {size: start_one(f"of {size}", layout, size=size, device=device) for size in sizes}
        for engine in engines.values():
            engine.peers_changed([other.info for other in engines.values() if other is not engine])
        for engine in engines.values():
            wait_until(lambda engine=engine: engine.stats().peers_ready == len(sizes) - 1)
        yield engines


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


@pytest.mark.slow
def test_shuffled_blocks_and_runs_arrive_intact_for_all_sizes(engines: dict[int, EngineProcess]) -> None:
    rng, seeds = random.Random(0), itertools.count()
    for holder, reader in itertools.permutations(engines.values(), 2):
        holder.fill(next(seeds))
        reader.fill(next(seeds))
        for source, target in [
            (rng.sample(range(NUM_BLOCKS), 9), rng.sample(range(NUM_BLOCKS), 9)),
            (list(range(3, 20)), list(range(10, 27))),
        ]:
            others = [block for block in range(NUM_BLOCKS) if block not in target]
            before = reader.content(others)
            offer = holder.offer("request", source)
            transfer = reader.receive(offer.ticket, 0, target)
            assert reader.events(1, 30.0) == [Received(transfer)]
            assert reader.content(target) == holder.content(source)
            assert reader.content(others) == before
            assert holder.events(1, 30.0) == [OfferEnded(offer.transfer_id, OfferOutcome.FINISHED)]


def test_statistics_include_the_reads_of_all_ranks(engines: dict[int, EngineProcess]) -> None:
    *_, holder, reader = engines.values()
    time.sleep(0.1)  # statistics are as of the transfer thread's last round
    before, layout = reader.stats(), reader.layout
    offer = holder.offer("request", [0, 1, 2])
    reader.receive(offer.ticket, 0, [4, 5, 6])
    assert [type(event) for event in reader.events(1, 30.0)] == [Received]
    assert [type(event) for event in holder.events(1, 30.0)] == [OfferEnded]
    heads_read = max(layout.num_kv_heads, reader.size)  # ranks that keep the same head each read it
    wait_until(lambda: reader.stats().bytes_read - before.bytes_read == 3 * heads_read * layout.head_bytes)
    assert reader.stats().descriptors_read - before.descriptors_read in (reader.size, 3 * reader.size)


def test_many_hand_offs_at_once_leave_nothing_behind(engines: dict[int, EngineProcess]) -> None:
    *_, holder, reader = engines.values()
    holder.fill(1)
    offers = [holder.offer(f"request-{number}", [2 * number, 2 * number + 1]) for number in range(16)]
    for number, offer in enumerate(offers):
        reader.receive(offer.ticket, 0, [2 * (15 - number), 2 * (15 - number) + 1])
    assert {type(event) for event in reader.events(16, 30.0)} == {Received}
    assert {type(event) for event in holder.events(16, 30.0)} == {OfferEnded}
    for number in range(16):
        mine, theirs = 2 * (15 - number), 2 * number
        assert reader.content([mine, mine + 1]) == holder.content([theirs, theirs + 1])
    wait_until(lambda: reader.stats().receives_active == holder.stats().leases_held == 0)


# ---------------------------------------------------------------------- ranks that die

SLOW = {"environ": (("UCX_TLS", "tcp"),), "settings": QUICK}  # with TCP, reads make no progress without the holder


def meet(start: Start, **options: object) -> tuple[EngineProcess, EngineProcess]:
    holder, reader = start("holder", HEADS, size=2, **options), start("reader", HEADS, size=2, **options)
    reader.peers_changed([holder.info])
    wait_until(lambda: reader.stats().peers_ready == 1)
    return holder, reader


def begin_a_read_that_hangs(holder: EngineProcess, reader: EngineProcess) -> int:
    """Begin a read in which rank 1 of the reader waits, since rank 1 of the holder is stopped."""
    pid = holder.ranks[1].process.pid
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    offer = holder.offer("request", [1, 2, 3])
    transfer = reader.receive(offer.ticket, 0, [1, 2, 3])
    wait_until(lambda: reader.stats().bytes_read > 0)
    return transfer


def test_a_reader_whose_rank_dies_during_a_read_fails_it_and_ends(start: Start) -> None:
    holder, reader = meet(start, **SLOW)
    transfer = begin_a_read_that_hangs(holder, reader)
    reader.ranks[1].kill()
    events, reason = reader.last_words(30.0)
    assert [type(event) for event in events] == [ReceiveFailed]
    assert events[0].transfer_id == transfer
    assert "the connection to rank 1 is broken" in events[0].reason
    assert "the connection to rank 1 is broken" in reason


@pytest.mark.slow
def test_a_holder_whose_rank_dies_during_a_read_fails_it_and_ends_while_the_reader_goes_on(start: Start) -> None:
    holder, reader = meet(start, **SLOW)
    transfer = begin_a_read_that_hangs(holder, reader)
    holder.ranks[1].kill()
    failed, released = reader.events(2, 30.0)
    assert isinstance(failed, ReceiveFailed)
    assert released == BlocksReleased(transfer)
    assert "rank 1" in holder.last_words(30.0)[1]
    other = start("other", HEADS, size=1, **SLOW)
    other.fill(5)
    transfer = reader.receive(other.offer("request", [7, 8]).ticket, 0, [1, 2])
    assert reader.events(1, 30.0) == [Received(transfer)]
    assert reader.content([1, 2]) == other.content([7, 8])


def test_a_read_that_is_cancelled_is_released_when_every_rank_has_ended_it(start: Start) -> None:
    holder, reader = meet(start, **SLOW)
    transfer = begin_a_read_that_hangs(holder, reader)
    reader.cancel(transfer)
    (failed,) = reader.events(1, 30.0)
    assert isinstance(failed, ReceiveFailed)
    assert reader.events(1, 0.5) == []
    assert reader.stats().blocks_quarantined == 3
    os.kill(holder.ranks[1].process.pid, signal.SIGCONT)
    assert reader.events(1, 30.0) == [BlocksReleased(transfer)]
    wait_until(lambda: reader.stats().blocks_quarantined == 0)


@pytest.mark.slow
@pytest.mark.parametrize("end", [RankProcess.kill, lambda rank: rank.order("close")], ids=["killed", "closed"])
def test_a_rank_that_ended_unnoticed_fails_the_next_receive(start: Start, end: Callable[[RankProcess], object]) -> None:
    holder, reader = meet(start)
    end(reader.ranks[1])
    assert reader.last_words(0.3) == ([], "")
    transfer = reader.receive(holder.offer("request", [1]).ticket, 0, [1])
    events, reason = reader.last_words(30.0)
    assert [(type(event), event.transfer_id) for event in events] == [(ReceiveFailed, transfer)]
    assert "rank 1" in reason
