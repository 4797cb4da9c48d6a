"""Peers of a hand-off: greeted, refused, lost, replaced, and what becomes of what is read from them."""

from __future__ import annotations

import msgspec
import pytest

from baton.engine.core.connector import BlocksReleased, OfferEnded, OfferOutcome, Received, ReceiveFailed
from baton.engine.core.layout import KVLayout
from baton.kv_transfer.handoff.peers import MAX_HANDSHAKE_PAUSE_S, PAIRING_S
from baton.kv_transfer.pacing import POLL_SERVING_S
from baton.kv_transfer.protocol.block_runs import encode_runs
from baton.kv_transfer.protocol.messages import DigestMode, EngineKey, HandshakeRequest, LeaseKey, encode
from baton.kv_transfer.settings import PeerInfo

from .handoff_engines import OURS, SETTINGS, THEIRS, Engines, ticket_of


def test_a_peer_is_warm_before_its_first_request() -> None:
    engines = Engines(OURS)
    engines.meet()


@pytest.mark.parametrize(
    ("holder_layout", "epoch", "reason"),
    [(THEIRS, 1, "its KV layout is"), (OURS, 2, "engine holder (epoch 2) is gone")],
    ids=["fingerprint", "epoch"],
)
def test_a_holder_refuses_whom_it_does_not_match(holder_layout: KVLayout, epoch: int, reason: str) -> None:
    """Even where the directory's word or the ticket claims otherwise."""
    engines = Engines(holder_layout)
    engines.reader.peers_changed([PeerInfo("holder", epoch, "tcp://holder", OURS.fingerprint)])
    engines.receive(EngineKey("holder", epoch))
    engines.pass_time()
    failed, released = engines.events
    assert isinstance(failed, ReceiveFailed)
    assert reason in failed.reason
    assert released == BlocksReleased(1)
    assert engines.reader.stats().peers_ready == 0
    engines.receive(EngineKey("holder", epoch))  # later ones fail at once
    assert isinstance(engines.events[2], ReceiveFailed)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"transport": "nixl/POSIX+UCX"}, "its transport is nixl/POSIX+UCX, the reader's is fake"),
        (
            {"settings": SETTINGS.model_copy(update={"digest": DigestMode.VERIFY})},
            "its transfer.digest is 'verify', the reader's is 'off'",
        ),
    ],
    ids=["transport or backends", "digests"],
)
def test_a_holder_that_is_set_up_otherwise_refuses_and_names_both(other: dict, reason: str) -> None:
    engines = Engines(**other)
    engines.reader.peers_changed([PeerInfo("holder", 1, "tcp://holder", OURS.fingerprint)])
    engines.receive(EngineKey("holder", 1))
    engines.pass_time()
    failed, _ = engines.events
    assert isinstance(failed, ReceiveFailed)
    assert f"holder refuses to pair: {reason}" in failed.reason


def test_a_broken_peer_is_greeted_anew_only_when_no_read_of_it_is_left() -> None:
    """A transport knows the memory before and after by one name: forgetting the old one would break the new one."""
    engines = Engines(OURS)
    engines.fabric.faults.fail, engines.fabric.faults.late_s = 1.0, (5.0, 5.0)
    engines.hand_over()
    assert isinstance(engines.events[0], ReceiveFailed)
    for _ in range(4):
        assert engines.reader.any_access
        assert engines.reader.stats().peers_ready == 0
        engines.pass_time(10)
    engines.pass_time(20)
    assert not engines.reader.any_access
    assert engines.reader.stats().peers_ready == 1


def test_when_a_peers_memory_is_lost_who_waits_for_more_of_it_fails_at_once_too() -> None:
    """Its next read could only fail, and until then nobody could be connected to that peer anew."""
    engines = Engines(OURS)
    engines.meet()
    holder = EngineKey("holder", 1)
    engines.holder.offer(LeaseKey(holder, "grows", 0, 7), [2], 0)
    grows = msgspec.structs.replace(
        ticket_of(holder), lease=LeaseKey(holder, "grows", 0, 7), runs=encode_runs([2]), num_ready=0
    )
    engines.reader.receive(2, grows.encode(), 0, [2])
    engines.pass_time(3)
    engines.fabric.faults.fail = 1.0
    engines.hand_over()
    engines.fabric.faults.fail = 0.0
    assert [type(event) for event in engines.events if event.transfer_id == 2] == [ReceiveFailed, BlocksReleased]
    engines.pass_time(10)
    assert OfferEnded(7, OfferOutcome.WITHDRAWN) in engines.events, "the holder need not keep what nobody reads"
    assert engines.reader.stats().peers_ready == 1


def test_a_peer_that_may_not_be_greeted_yet_is_waited_for_asleep() -> None:
    """The holder of what was read does not answer for its digests, and its memory is lost meanwhile."""
    proving = SETTINGS.model_copy(update={"digest": DigestMode.VERIFY})
    engines = Engines(settings=proving, reader_settings=proving)
    engines.meet()
    holder = EngineKey("holder", 1)
    proven = msgspec.structs.replace(ticket_of(holder), digest=DigestMode.VERIFY)
    engines.holder.offer(LeaseKey(holder, "request", 0, 1), [1], 1)
    engines.reader.receive(1, proven.encode(), 0, [1])
    for _ in range(2):
        engines.reader.pump()
        engines.holder.pump()
    engines.network.faults.drop = 1.0
    other = msgspec.structs.replace(proven, lease=LeaseKey(holder, "other", 0, 2))
    engines.fabric.faults.fail = 1.0
    engines.reader.receive(2, other.encode(), 0, [2])
    engines.pass_time(3)
    assert engines.events[0].transfer_id == 2, "the first waits for digests"
    assert engines.reader.pump() > 0.0
    engines.fabric.faults.fail = engines.network.faults.drop = 0.0
    engines.pass_time(400)
    assert engines.reader.stats().peers_ready == 1


def test_a_peer_that_left_the_cluster_is_forgotten_and_what_is_read_of_it_fails_at_once() -> None:
    engines = Engines(OURS)
    engines.fabric.faults.read_s = (5.0, 5.0)
    engines.hand_over()
    engines.reader.peers_changed([])
    (failed,) = engines.events
    assert failed == ReceiveFailed(1, "engine holder (epoch 1) left the cluster")
    assert (engines.reader.stats().peers_ready, engines.reader.stats().blocks_quarantined) == (0, 1)
    engines.pass_time(60)
    assert engines.events[1:] == [OfferEnded(1, OfferOutcome.WITHDRAWN), BlocksReleased(1)], "a live holder is told"
    assert engines.reader.stats().peers_ready == 0


def test_nobody_waits_for_what_a_peer_offers_that_is_cut_off_until_it_answers() -> None:
    engines = Engines(OURS)
    engines.meet()
    engines.network.faults.drop = 1.0
    engines.reader_channel.break_all()
    engines.pass_time(5)
    assert engines.reader.stats().peers_ready == 0
    engines.holder.offer(LeaseKey(EngineKey("holder", 1), "request", 0, 1), [1], 1)
    engines.receive(EngineKey("holder", 1))
    assert engines.events == [ReceiveFailed(1, "holder at tcp://holder is cut off"), BlocksReleased(1)]
    engines.network.faults.drop = 0.0
    engines.pass_time(40)
    engines.receive(EngineKey("holder", 1))
    engines.pass_time(10)
    assert Received in map(type, engines.events)


def test_a_peer_that_broke_while_it_was_warmed_is_greeted_again_unasked() -> None:
    engines = Engines(OURS)
    engines.fabric.faults.break_peer = 1.0
    engines.reader.peers_changed([PeerInfo("holder", 1, "tcp://holder", OURS.fingerprint)])
    for _ in range(20):
        assert engines.reader.pump() <= MAX_HANDSHAKE_PAUSE_S
        engines.holder.pump()
        engines.clock.advance(0.1)
    engines.fabric.faults.break_peer = 0.0
    engines.pass_time(100)
    assert engines.reader.stats().peers_ready == 1


def test_a_peer_is_connected_though_its_help_came_while_nobody_looked() -> None:
    engines = Engines(helped=True)
    engines.reader.peers_changed([PeerInfo("holder", 1, "tcp://holder", OURS.fingerprint)])
    for engine in (engines.reader, engines.holder):
        engine.pump()
    for _ in range(50):
        engines.clock.advance(0.1)
        engines.holder.pump()
    assert engines.holder.pump() > POLL_SERVING_S, "it has no reason to help any more"
    engines.pass_time()
    assert engines.reader.stats().peers_ready == 1


@pytest.mark.parametrize("connect_s", [2.0, 3.0, 6.0, 10.0, 20.0])
def test_a_peer_that_takes_long_to_connect_is_helped_all_the_time(connect_s: float) -> None:
    """Its link may be slow: then the reads that measure it advance only while it helps."""
    engines = Engines(helped=True)
    engines.fabric.faults.connect_s = (connect_s, connect_s)
    engines.reader.peers_changed([PeerInfo("holder", 1, "tcp://holder", OURS.fingerprint)])
    while engines.reader.peers.warming_since is None:
        engines.pass_time(1)
    engines.pass_time(round(10 * connect_s) + 3)
    assert engines.reader.stats().peers_ready == 1


def test_greetings_that_waited_for_a_connection_are_answered_once() -> None:
    engines = Engines()
    link = engines.reader_channel.connect("tcp://holder")
    hello = HandshakeRequest(EngineKey("reader", 1), EngineKey("holder", 1), OURS.fingerprint, "fake", DigestMode.OFF)
    for _ in range(1000):
        engines.reader_channel.send(link, encode(hello))
    engines.clock.advance(0.1)
    engines.network.num_sent = 0
    engines.holder.pump()
    assert engines.network.num_sent == 1
    engines.reader_channel.send(link, encode(hello))
    engines.clock.advance(0.1)
    engines.holder.pump()
    assert engines.network.num_sent == 3, "a later one, and its answer"


def test_a_peer_that_was_replaced_while_it_was_connected_is_refused_and_let_go() -> None:
    """Another process answers at its address: what is asked of it there fails with its word, not with the time."""
    engines = Engines(helped=True)
    engines.reader.peers_changed([PeerInfo("holder", 1, "tcp://holder", OURS.fingerprint)])
    for engine in (engines.reader, engines.holder, engines.reader):
        engine.pump()
    engines.receive(EngineKey("holder", 1))
    engines.holder = engines.engine("holder", THEIRS, "fake", SETTINGS)
    engines.pass_time(10)
    failed, released = engines.events
    assert failed.reason.startswith("holder refuses to pair: its KV layout is")
    assert released == BlocksReleased(1)
    assert engines.reader.pump() > POLL_SERVING_S


class TestAPeerThatNeverAnswersHalfWay:
    """It answers handshakes, and its memory does not."""

    @staticmethod
    def hang() -> Engines:
        engines = Engines()
        engines.fabric.faults.connect_s = (1e6, 1e6)
        engines.reader.peers_changed([PeerInfo("holder", 1, "tcp://holder", OURS.fingerprint)])
        engines.pass_time(round(10 * PAIRING_S) - 30)
        return engines

    def test_what_waits_for_it_fails_and_later_requests_do_not_wait(self, caplog: pytest.LogCaptureFixture) -> None:
        engines = self.hang()
        engines.receive(EngineKey("holder", 1))
        assert not engines.events, "it may still be connected"
        engines.pass_time(round(10 * SETTINGS.connect_s) + 1)
        assert [type(event) for event in engines.events] == [ReceiveFailed, BlocksReleased]
        engines.receive(EngineKey("holder", 1))
        reason = "the memory of holder at tcp://holder does not answer"
        assert engines.events[2:] == [ReceiveFailed(1, reason), BlocksReleased(1)]
        assert "the memory of holder at tcp://holder does not answer: not connected within 30 s" in caplog.text

    def test_it_is_paired_anew_and_nothing_of_the_earlier_attempts_is_left(self) -> None:
        engines = self.hang()
        engines.pass_time(round(30 * PAIRING_S))
        assert engines.transports["reader"].num_peers <= 1
        engines.fabric.faults.connect_s = (0.0, 0.0)
        engines.pass_time(round(10 * (PAIRING_S + MAX_HANDSHAKE_PAUSE_S)))
        assert engines.reader.stats().peers_ready == 1
        engines.holder.offer(LeaseKey(EngineKey("holder", 1), "request", 0, 1), [1], 1)
        engines.receive(EngineKey("holder", 1))
        engines.pass_time(3)
        assert Received in map(type, engines.events)

    def test_others_are_paired_and_read_meanwhile(self) -> None:
        engines = self.hang()
        engines.fabric.faults.connect_s = (0.0, 0.0)
        other = engines.engine("other", OURS, "fake", SETTINGS)
        live = [PeerInfo(name, 1, f"tcp://{name}", OURS.fingerprint) for name in ("holder", "other")]
        engines.reader.peers_changed(live)
        for _ in range(20):
            engines.pass_time(1)
            other.pump()
        lanes = engines.reader.stats().lanes
        assert [lane.engine_id for lane in lanes] == ["other"]


def test_a_peer_that_accepts_a_connection_and_says_nothing_fails_what_waits_for_it() -> None:
    engines = Engines()
    silent = engines.network.bind("tcp://silent")
    engines.reader.peers_changed([PeerInfo("silent", 1, "tcp://silent", OURS.fingerprint)])
    ticket = msgspec.structs.replace(ticket_of(EngineKey("silent", 1)), kv_address="tcp://silent")
    engines.reader.receive(1, ticket.encode(), 0, [1])
    engines.pass_time(round(10 * SETTINGS.connect_s) + 1)
    assert silent.receive()
    assert [type(event) for event in engines.events] == [ReceiveFailed, BlocksReleased]
    assert f"no connection to silent at tcp://silent within {SETTINGS.connect_s:g} s" in engines.events[0].reason
    engines.meet()
