"""Hand-offs between two processes on CPU memory, over each transport."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.engine.core.connector import (
    BlocksReleased,
    ConnectorEvent,
    OfferEnded,
    OfferOutcome,
    Received,
    ReceiveFailed,
)
from baton.engine.core.layout import KVLayout
from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.connector import TransferSettings

from .connector_cases import QUICK, SMALL, wait_until
from .engine_process import DEFAULT_SETTINGS, EngineProcess

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(120), pytest.mark.slow]

LARGE = KVLayout(model="large", num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")  # 2 MB a block
Start = Callable[..., EngineProcess]
Pair = tuple[EngineProcess, EngineProcess]


@contextlib.contextmanager
def starting(transport: str) -> Iterator[Start]:
    key = ClusterKey.generate()
    running: list[EngineProcess] = []

    def start_one(
        name: str, layout: KVLayout = SMALL, settings: TransferSettings = DEFAULT_SETTINGS, **options: object
    ) -> EngineProcess:
        settings = settings.model_copy(update={"transport": transport})
        running.append(EngineProcess(name, key, layout, settings=settings, **options))
        return running[-1]

    try:
        yield start_one
    finally:
        for engine in running:
            engine.kill()


@pytest.fixture(scope="module", params=["nixl", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def start(transport: str) -> Iterator[Start]:
    with starting(transport) as start_one:
        yield start_one


def meet(start: Start, layout: KVLayout = SMALL, **options: object) -> Pair:
    """Start a prefill and a decode engine that are connected."""
    prefill, decode = start("prefill", layout, **options), start("decode", layout, **options)
    prefill.fill(1)
    decode.peers_changed([prefill.info])
    wait_until(lambda: decode.stats().peers_ready == 1)
    (lane,) = decode.stats().lanes
    assert (lane.engine_id, lane.is_slow) == (prefill.info.engine_id, False)
    assert lane.bytes_per_s is not None
    assert lane.bytes_per_s > 0
    return prefill, decode


@pytest.fixture(scope="module")
def pair(transport: str) -> Iterator[Pair]:
    """Engines for tests that change nothing but the content of memory."""
    with starting(transport) as start_one:
        yield meet(start_one, num_blocks=256)


@pytest.fixture
def slow_pair(start: Start) -> Pair:
    """Engines that transfer a quarter of a gigabyte over TCP, slow enough to be interrupted."""
    return meet(start, LARGE, num_blocks=128, environ=(("UCX_TLS", "tcp"),))


def kinds(events: list[ConnectorEvent]) -> list[type]:
    return [type(event) for event in events]


def hand_over_shuffled_blocks(prefill: EngineProcess, decode: EngineProcess) -> None:
    rng, before = random.Random(0), decode.stats().bytes_read
    for number in range(5):
        source, target = rng.sample(range(128), 12), rng.sample(range(128), 12)
        offer = prefill.offer(f"request-{number}", source)
        transfer = decode.receive(offer.ticket, 0, target)
        assert decode.events(1, 30.0) == [Received(transfer)]
        assert decode.content(target) == prefill.content(source)
        assert prefill.events(1, 30.0) == [OfferEnded(offer.transfer_id, OfferOutcome.FINISHED)]
    assert decode.stats().bytes_read - before == 5 * len(prefill.content(source))


def test_shuffled_blocks_arrive_intact(pair: Pair) -> None:
    hand_over_shuffled_blocks(*pair)


def test_shuffled_blocks_arrive_intact_over_tcp(slow_pair: Pair) -> None:
    hand_over_shuffled_blocks(*slow_pair)


def test_only_the_blocks_behind_a_cached_prefix_are_fetched(pair: Pair) -> None:
    prefill, decode = pair
    before = decode.content([3])
    offer = prefill.offer("request", [3, 4, 5, 9])
    transfer = decode.receive(offer.ticket, 2, [20, 21])
    assert decode.events(1, 30.0) == [Received(transfer)]
    assert decode.content([20, 21]) == prefill.content([5, 9])
    assert decode.content([3]) == before
    assert prefill.events(1, 30.0) == [OfferEnded(offer.transfer_id, OfferOutcome.FINISHED)]


def test_a_prefix_that_is_cached_whole_still_ends_the_offer(pair: Pair) -> None:
    prefill, decode = pair
    offer = prefill.offer("request", [3, 4])
    assert decode.receive(offer.ticket, 2, []) == decode.events(1, 30.0)[0].transfer_id
    assert prefill.events(1, 30.0) == [OfferEnded(offer.transfer_id, OfferOutcome.FINISHED)]


def test_blocks_are_read_as_they_are_written_and_received_when_all_are_read(pair: Pair) -> None:
    prefill, decode = pair
    source, target = list(range(40, 52)), list(range(60, 72))
    before = decode.stats()
    offer = prefill.offer_growing("request", source)
    transfer = decode.receive(offer.ticket, 0, target)
    for num_ready in (4, 9):
        prefill.advance(offer.transfer_id, num_ready)
        wait_until(lambda: decode.stats().blocks_read_early - before.blocks_read_early == num_ready)  # noqa: B023
        assert decode.content(target[:num_ready]) == prefill.content(source[:num_ready])
    assert decode.events(1, 0.1) == prefill.events(1, 0.1) == []
    prefill.advance(offer.transfer_id, len(source))
    assert decode.events(1, 30.0) == [Received(transfer)]
    assert decode.content(target) == prefill.content(source)
    assert prefill.events(1, 30.0) == [OfferEnded(offer.transfer_id, OfferOutcome.FINISHED)]


def test_a_growing_offer_that_is_withdrawn_ends_when_its_reader_has_stopped(pair: Pair) -> None:
    prefill, decode = pair
    offer = prefill.offer_growing("request", [40, 41, 42])
    before = decode.stats().blocks_read_early
    transfer = decode.receive(offer.ticket, 0, [60, 61, 62])
    prefill.advance(offer.transfer_id, 2)
    wait_until(lambda: decode.stats().blocks_read_early - before == 2)
    prefill.withdraw(offer.transfer_id)
    failed, released = decode.events(2, 30.0)
    assert "the holder withdrew the offer" in failed.reason
    assert released == BlocksReleased(transfer)
    assert prefill.events(1, 30.0) == [OfferEnded(offer.transfer_id, OfferOutcome.WITHDRAWN)]


def test_a_ticket_works_before_the_directory_has_named_its_holder(start: Start) -> None:
    prefill, decode = start("prefill"), start("decode")
    prefill.fill(2)
    offer = prefill.offer("request", [1, 2])
    transfer = decode.receive(offer.ticket, 0, [8, 7])
    assert decode.events(1, 30.0) == [Received(transfer)]
    assert decode.content([8, 7]) == prefill.content([1, 2])


def test_cancelling_during_a_read_frees_the_blocks_once_nothing_can_write(slow_pair: Pair) -> None:
    prefill, decode = slow_pair
    offer = prefill.offer("request", list(range(128)))
    transfer = decode.receive(offer.ticket, 0, list(range(128)))
    decode.cancel(transfer)
    assert kinds(decode.events(2, 30.0)) == [ReceiveFailed, BlocksReleased]
    before = decode.digest(range(128))
    assert prefill.events(1, 30.0) == [OfferEnded(offer.transfer_id, OfferOutcome.WITHDRAWN)]
    time.sleep(0.5)
    assert decode.digest(range(128)) == before
    assert decode.stats().blocks_quarantined == 0


def test_an_unclaimed_offer_expires_and_later_claims_fail(start: Start) -> None:
    prefill, decode = meet(start, settings=QUICK)
    offer = prefill.offer("request", [1, 2])
    assert prefill.events(1, 30.0) == [OfferEnded(offer.transfer_id, OfferOutcome.EXPIRED)]
    decode.receive(offer.ticket, 0, [1, 2])
    failed, released = decode.events(2, 30.0)
    assert "the offer has ended" in failed.reason
    assert released == BlocksReleased(failed.transfer_id)


def test_a_withdrawn_offer_is_refused(pair: Pair) -> None:
    prefill, decode = pair
    offer = prefill.offer("request", [1, 2])
    prefill.withdraw(offer.transfer_id)
    assert prefill.events(1, 30.0) == [OfferEnded(offer.transfer_id, OfferOutcome.WITHDRAWN)]
    decode.receive(offer.ticket, 0, [1, 2])
    assert kinds(decode.events(2, 30.0)) == [ReceiveFailed, BlocksReleased]


def test_a_holder_killed_during_a_transfer_fails_the_receive_within_two_seconds(slow_pair: Pair) -> None:
    prefill, decode = slow_pair
    offer = prefill.offer("request", list(range(128)))
    decode.receive(offer.ticket, 0, list(range(128)))
    prefill.kill()
    decode.peers_changed([])
    killed_at = time.monotonic()
    failed, released = decode.events(2, 30.0)
    assert time.monotonic() - killed_at < 2.0
    assert isinstance(failed, ReceiveFailed)
    assert isinstance(released, BlocksReleased)
    wait_until(lambda: decode.stats().peers_ready == 0)


def has_stopped(pid: int) -> bool:
    states = [
        task.joinpath("stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()
    ]
    return set(states) == {"T"}


@pytest.mark.parametrize("reader_lives", [True, False])
def test_a_holder_that_was_stopped_keeps_nothing_for_a_reader_that_gave_up(reader_lives: bool, start: Start) -> None:
    """A live reader says that it gave up. A dead reader's lease ends by its time, which includes that of the stop.

    A lease of an hour outlasts the test, one of 6 s ends while the holder is stopped.
    """
    lease_s = 3600.0 if reader_lives else 6.0
    prefill, decode = meet(start, settings=QUICK.model_copy(update={"lease_s": lease_s}))
    offer = prefill.offer("request", [1, 2])
    wait_until(lambda: prefill.stats().leases_held == 1)
    holder = prefill.ranks[0].process.pid
    os.kill(holder, signal.SIGSTOP)
    wait_until(lambda: has_stopped(holder))
    decode.receive(offer.ticket, 0, [1, 2])
    assert ReceiveFailed in kinds(decode.events(1, 30.0))
    if not reader_lives:
        decode.kill()
        time.sleep(lease_s)
    os.kill(holder, signal.SIGCONT)
    outcome = OfferOutcome.WITHDRAWN if reader_lives else OfferOutcome.EXPIRED
    assert prefill.events(1, 10.0) == [OfferEnded(offer.transfer_id, outcome)]


def test_a_receive_from_a_dead_holder_fails_without_notice_of_its_death(start: Start) -> None:
    prefill, decode = meet(start, settings=QUICK)
    offer = prefill.offer("request", [1, 2])
    prefill.kill()
    decode.receive(offer.ticket, 0, [1, 2])
    assert kinds(decode.events(2, 15.0)) == [ReceiveFailed, BlocksReleased]


def test_a_restarted_engine_is_another_peer(start: Start) -> None:
    settings = DEFAULT_SETTINGS.model_copy(update={"connect_s": QUICK.connect_s})
    prefill, decode = meet(start, settings=settings)
    stale = prefill.offer("request", [1, 2])
    prefill.kill()
    again = start("prefill", settings=settings, epoch=2)
    again.fill(3)
    decode.peers_changed([again.info])
    decode.receive(stale.ticket, 0, [1, 2])
    offer = again.offer("request", [1, 2])
    transfer = decode.receive(offer.ticket, 0, [5, 6])
    events = decode.events(3, 15.0)
    assert Received(transfer) in events
    assert sorted(kind.__name__ for kind in kinds(events)) == ["BlocksReleased", "ReceiveFailed", "Received"]
    assert decode.content([5, 6]) == again.content([1, 2])


def test_engines_of_different_layouts_never_pair(start: Start) -> None:
    other = KVLayout(model="other weights", num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    prefill, decode = start("prefill"), start("decode", other)
    decode.peers_changed([prefill.info])
    offer = prefill.offer("request", [1])
    decode.receive(offer.ticket, 0, [1])
    failed, _released = decode.events(2, 30.0)
    assert SMALL.fingerprint in failed.reason
    assert other.fingerprint in failed.reason
    assert decode.stats().peers_ready == 0


@pytest.mark.parametrize(
    ("theirs", "ours", "names"),
    [
        ({"transport": "nixl"}, {"transport": "ucx"}, ("nixl/UCX", "ucx")),
        ({"backends": ("UCX",)}, {"backends": ("UCX", "POSIX")}, ("nixl/UCX", "nixl/POSIX+UCX")),
    ],
    ids=["transports", "backends"],
)
def test_engines_of_different_transports_or_backends_name_them_in_the_error(
    theirs: dict, ours: dict, names: tuple[str, str]
) -> None:
    key = ClusterKey.generate()
    prefill = EngineProcess("prefill", key, SMALL, settings=TransferSettings(**theirs))
    decode = EngineProcess("decode", key, SMALL, settings=TransferSettings(**ours))
    try:
        decode.peers_changed([prefill.info])
        decode.receive(prefill.offer("request", [1]).ticket, 0, [1])
        by_ticket, _ = decode.events(2, 30.0)
        assert f"the ticket is for transport {names[0]}, here is {names[1]}" in by_ticket.reason
        assert decode.stats().peers_ready == 0
    finally:
        prefill.kill()
        decode.kill()


def test_many_hand_offs_at_once_leave_nothing_behind(pair: Pair) -> None:
    prefill, decode = pair
    offers = [prefill.offer(f"request-{number}", range(4 * number, 4 * number + 4)) for number in range(64)]
    for number, offer in enumerate(offers):
        decode.receive(offer.ticket, 0, range(4 * (63 - number), 4 * (63 - number) + 4))
    assert kinds(decode.events(64, 30.0)) == [Received] * 64
    assert kinds(prefill.events(64, 30.0)) == [OfferEnded] * 64
    for number in range(64):
        mine, theirs = 4 * (63 - number), 4 * number
        assert decode.content(range(mine, mine + 4)) == prefill.content(range(theirs, theirs + 4))
    assert decode.stats().receives_active == decode.stats().blocks_quarantined == prefill.stats().leases_held == 0
