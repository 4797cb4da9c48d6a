"""A connector by itself: its thread, tickets, its clock, and its end."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from baton.engine.core.connector import (
    BlocksReleased,
    ConnectorEvent,
    OfferEnded,
    OfferOutcome,
    Received,
    ReceiveFailed,
)
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.kv_transfer.channel import Route, ZmqChannel
from baton.kv_transfer.connector import PeerInfo, TransferConnector, TransferSettings
from baton.kv_transfer.errors import TransferThreadDied, TransportError
from baton.kv_transfer.handoff.coordinator import HandoffCoordinator
from baton.kv_transfer.protocol.block_runs import encode_runs
from baton.kv_transfer.protocol.messages import DigestMode, EngineKey, LeaseKey
from baton.kv_transfer.protocol.ticket import TICKET_VERSION, Ticket
from baton.kv_transfer.settings import LocalEngine

from .connector_cases import QUICK, SMALL, wait_until
from .engine_process import untimed

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(120)]


@contextlib.contextmanager
def connecting(
    engine_id: str, settings: TransferSettings = QUICK, wake: Callable[[], None] = lambda: None
) -> Iterator[TransferConnector]:
    memory = np.zeros((8, SMALL.block_bytes), dtype=np.uint8)
    region = CacheRegion.of(ArenaRegion(memory.ctypes.data, 8, "cpu", SMALL, 0, SMALL.num_kv_heads))
    connector = TransferConnector(region, LocalEngine(engine_id, 1, "127.0.0.1", None), settings=settings, wake=wake)
    try:
        yield connector
    finally:
        connector.close()


@pytest.fixture
def connector() -> Iterator[TransferConnector]:
    with connecting("alone") as connector:
        yield connector


def events_of(connector: TransferConnector, count: int) -> list[ConnectorEvent]:
    found: list[ConnectorEvent] = []

    def enough() -> bool:
        found.extend(connector.poll())
        return len(found) >= count

    wait_until(enough)
    return untimed(found)


def transfer_thread() -> int:
    """Return the id of the one transfer thread of this process."""
    (thread_id,) = (each.native_id for each in threading.enumerate() if each.name == "baton-transfer")
    assert thread_id is not None
    return thread_id


def test_the_transfer_thread_runs_where_the_settings_say() -> None:
    allowed = os.sched_getaffinity(0)
    cpu = max(allowed)
    with connecting("pinned", QUICK.model_copy(update={"cpu_affinity": str(cpu)})):
        assert os.sched_getaffinity(transfer_thread()) == {cpu}
    assert os.sched_getaffinity(0) == allowed


def test_the_transfer_threads_sleeps_have_no_timer_slack(connector: TransferConnector) -> None:
    """By default Linux adds up to 50 us to a sleep, as much as a whole read takes over NVLink."""
    slack = Path(f"/proc/{transfer_thread()}/timerslack_ns").read_text()
    assert int(slack) == 1
    assert int(Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text()) > 1


def test_prompts_are_offered_early_unless_the_settings_forbid_it(connector: TransferConnector) -> None:
    assert connector.offers_early
    with connecting("patient", QUICK.model_copy(update={"progressive": False})) as patient:
        assert not patient.offers_early


def test_a_claim_that_arrives_before_the_transfer_thread_has_its_offer_is_granted(
    connector: TransferConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connecting("reader") as reader:
        reader.peers_changed([PeerInfo("alone", 1, connector.address, SMALL.fingerprint)])
        wait_until(lambda: reader.stats().peers_ready == 1)
        listening, claimed, receive = threading.Event(), threading.Event(), ZmqChannel.receive

        def receive_late(channel: ZmqChannel) -> list[tuple[Route, bytes]]:
            if channel.address == connector.address:
                listening.set()
                claimed.wait(30.0)
                time.sleep(0.1)  # time for the claim to arrive
            return receive(channel)

        monkeypatch.setattr(ZmqChannel, "receive", receive_late)
        connector.cancel(12345)  # any call wakes the thread
        assert listening.wait(30.0)
        offer = connector.offer("request", 0, [1], 16)
        transfer = reader.receive("request", 0, offer.ticket, 0, [1])
        claimed.set()
        assert events_of(reader, 1) == [Received(transfer)]


@pytest.mark.parametrize("ticket", [b"", b"\xc1", b"nonsense" * 100])
def test_an_invalid_ticket_fails_the_receive(ticket: bytes, connector: TransferConnector) -> None:
    transfer = connector.receive("request", 0, ticket, 0, [1])
    failed, released = events_of(connector, 2)
    assert "cannot be read as ticket" in failed.reason
    assert released == BlocksReleased(transfer)


def test_a_ticket_for_more_blocks_than_are_to_be_filled_fails_the_receive(connector: TransferConnector) -> None:
    offer = connector.offer("request", 0, [1, 2, 3], 48)
    connector.receive("request", 0, offer.ticket, 1, [5])
    failed, _ = events_of(connector, 2)
    assert "offers 3 blocks; from block 1 on that is 2, but 1 are to be filled" in failed.reason


def ticket_of_nobody(address: str = "tcp://127.0.0.1:9") -> bytes:
    """Return a ticket of a holder that does not exist."""
    lease = LeaseKey(EngineKey("nobody", 7), "request", 0, 1)
    ticket = Ticket(
        TICKET_VERSION, lease, address, SMALL.fingerprint, "nixl/UCX", 16, 30.0, DigestMode.OFF, 1, encode_runs([1])
    )
    return ticket.encode()


@pytest.mark.slow
def test_a_holder_that_does_not_exist_fails_the_receive(connector: TransferConnector) -> None:
    connector.receive("request", 0, ticket_of_nobody(), 0, [1])
    failed, _ = events_of(connector, 2)
    assert "no connection to nobody at tcp://127.0.0.1:9 within 2 s" in failed.reason


@pytest.mark.parametrize("address", ["nonsense", "tcp://nonsense", "ipc:///tmp/elsewhere"])
def test_an_invalid_address_fails_the_receive_and_nothing_else(address: str, connector: TransferConnector) -> None:
    for _ in range(2):
        connector.peers_changed([PeerInfo("nobody", 7, address, SMALL.fingerprint)])
        connector.receive("request", 0, ticket_of_nobody(address), 0, [1])
        failed, released = events_of(connector, 2)
        assert address in failed.reason
        assert released == BlocksReleased(failed.transfer_id)


def test_the_engine_is_woken_once_for_each_event() -> None:
    woken: list[int] = []
    with connecting("alone", wake=lambda: woken.append(1)) as connector:
        connector.receive("request", 0, b"no ticket", 0, [1])
        wait_until(lambda: len(woken) == 2)
        connector.cancel(12345)  # starts another round, before the events are read
        connector.receive("request", 0, b"no ticket", 0, [1])
        wait_until(lambda: len(woken) >= 4)
        assert len(woken) == len(connector.poll()) == 4


def test_a_constructor_that_fails_leaves_no_socket_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[ZmqChannel] = []
    monkeypatch.setattr(ZmqChannel, "close", lambda channel: closed.append(channel))
    monkeypatch.setattr("baton.kv_transfer.connector.open_transport", lambda *_: 1 / 0)
    region = CacheRegion.of(ArenaRegion(4096, 8, "cpu", SMALL, 0, SMALL.num_kv_heads))
    with pytest.raises(ZeroDivisionError):
        TransferConnector(region, LocalEngine("alone", 1, "127.0.0.1", None))
    assert len(closed) == 1
    assert "baton-transfer" not in {thread.name for thread in threading.enumerate()}
    monkeypatch.undo()
    closed[0].close()


def test_a_transfer_thread_that_dies_fails_its_transfers_with_the_reason(
    connector: TransferConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = connector.receive("request", 0, ticket_of_nobody(), 0, [1])
    wait_until(lambda: connector.stats().receives_active == 1)
    monkeypatch.setattr(HandoffCoordinator, "pump", lambda self, calls: 1 / 0)
    connector.cancel(12345)  # any call wakes the thread
    failed, released = events_of(connector, 2)
    assert failed == ReceiveFailed(transfer, "KV transfers stopped: division by zero")
    assert released == BlocksReleased(transfer)
    with pytest.raises(TransferThreadDied, match="division by zero"):
        connector.poll()


def test_a_device_that_cannot_be_registered_is_an_error_of_the_constructor() -> None:
    region = CacheRegion.of(ArenaRegion(4096, 8, "tpu:0", SMALL, 0, SMALL.num_kv_heads))
    with pytest.raises(TransportError, match="'cpu' and 'cuda:N'"):
        TransferConnector(region, LocalEngine("alone", 1, "127.0.0.1", None))


# ---------------------------------------------------------------------- the clock of leases


@pytest.fixture
def suspend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that fakes a suspension of the machine, which only CLOCK_BOOTTIME counts."""
    slept_s = [0.0]
    clock_gettime = time.clock_gettime

    def with_sleep(clock: int) -> float:
        return clock_gettime(clock) + (slept_s[0] if clock == time.CLOCK_BOOTTIME else 0.0)

    monkeypatch.setattr(time, "clock_gettime", with_sleep)

    def suspend(seconds: float) -> None:
        slept_s[0] += seconds

    return suspend


def test_leases_expire_while_the_machine_is_suspended(suspend: Callable[[float], None]) -> None:
    with connecting("holder", QUICK.model_copy(update={"lease_s": 3600.0})) as holder:
        offer = holder.offer("request", 0, [1, 2], 32)
        wait_until(lambda: holder.stats().leases_held == 1)
        suspend(3601.0)
        holder.peers_changed([])  # a call wakes the thread
        assert events_of(holder, 1) == [OfferEnded(offer.transfer_id, OfferOutcome.EXPIRED)]


def test_times_of_events_are_on_the_engines_clock(suspend: Callable[[float], None]) -> None:
    suspend(3600.0)
    with connecting("holder") as holder, connecting("reader") as reader:
        offer = holder.offer("request", 0, [1], 16)
        began_s = time.monotonic()
        reader.receive("request", 0, offer.ticket, 0, [1])
        found: list[ConnectorEvent] = []
        wait_until(lambda: found.extend(reader.poll()) or bool(found))
        (received,) = found
        assert isinstance(received, Received)
        assert began_s <= received.claimed_s <= received.pulled_s <= time.monotonic()
