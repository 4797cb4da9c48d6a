"""HandshakeResponder between two engines over the fakes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from baton.engine.core.connector import BlocksReleased, OfferEnded, OfferOutcome, Received, ReceiveFailed
from baton.engine.core.layout import KVLayout
from baton.kv_transfer.pacing import POLL_SERVING_S
from baton.kv_transfer.protocol.block_runs import BlockRun, encode_runs
from baton.kv_transfer.protocol.messages import DigestMode, EngineKey, LeaseKey
from baton.kv_transfer.protocol.ticket import TICKET_VERSION, Ticket
from baton.kv_transfer.transports import ByteRange, ReadState

from ...helpers.fake_transport import FakeTransport
from .handoff_engines import OURS, SETTINGS, THEIRS, Engines, ticket_of


def test_a_ticket_for_blocks_that_the_holder_lacks_costs_nobody_else_the_connection() -> None:
    engines = Engines(OURS)
    engines.meet()
    memory = engines.reader.peers.get(EngineKey("holder", 1)).memory
    engines.receive(EngineKey("holder", 1), block=4000)
    engines.pass_time()
    failed, released = engines.events
    assert "is outside the" in failed.reason
    assert released == BlocksReleased(1)
    assert engines.reader.peers.get(EngineKey("holder", 1)).memory == memory


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": THEIRS.fingerprint}, f"KV layout is {THEIRS.fingerprint}, this engine's {OURS.fingerprint}"),
        ({"transport": "ucx"}, "the ticket is for transport ucx, here is fake"),
        ({"digest": DigestMode.VERIFY}, "holder has transfer.digest 'verify', here it is 'off'"),
        ({"num_tokens": 17}, "offers 1 blocks for 17 tokens; blocks of 16 need 2"),
        ({"runs": msgspec.Raw(msgspec.msgpack.encode([BlockRun(2**57, 1)]))}, "cannot be read as runs of blocks"),
        ({"refusal": "its host buffer is full"}, "holder offers nothing: its host buffer is full"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_ticket_that_cannot_be_used_fails_at_once_and_says_why(change: dict, reason: str) -> None:
    engines = Engines(OURS)
    engines.meet()
    engines.holder.offer(LeaseKey(EngineKey("holder", 1), "request", 0, 1), [1], 1)
    ticket = msgspec.structs.replace(ticket_of(EngineKey("holder", 1)), **change)
    engines.reader.receive(1, ticket.encode(), 0, [1])
    failed, released = engines.events
    assert isinstance(failed, ReceiveFailed)
    assert reason in failed.reason
    assert released == BlocksReleased(1)


@pytest.mark.parametrize("block", [-1, 4])
def test_a_block_that_the_reader_does_not_have_is_never_written(block: int) -> None:
    engines = Engines(OURS)
    engines.meet()
    engines.reader.receive(1, ticket_of(EngineKey("holder", 1)).encode(), 0, [block])
    assert engines.events == [ReceiveFailed(1, "a block to be filled is outside this engine's 4"), BlocksReleased(1)]


def test_a_read_of_a_peer_that_is_cut_off_fails_at_once_and_its_blocks_come_back_when_it_has_ended() -> None:
    engines = Engines(OURS)
    engines.fabric.faults.read_s = (5.0, 5.0)
    engines.hand_over()
    assert engines.reader.any_access
    engines.reader_channel.break_all()
    engines.pass_time(1)
    (failed,) = engines.events
    assert isinstance(failed, ReceiveFailed)
    assert "holder at tcp://holder ended, or is silent" in failed.reason
    assert engines.reader.stats().blocks_quarantined == 1
    assert engines.reader.stats().receives_active == 0, "nobody loses anything where the engine ends now"
    engines.pass_time(60)
    assert engines.events[1:] == [OfferEnded(1, OfferOutcome.WITHDRAWN), BlocksReleased(1)], "the holder was told"
    assert engines.reader.stats().peers_ready == 1, "it was greeted again"


@pytest.mark.slow
def test_a_prompt_of_a_million_tokens_is_proven_whatever_one_message_takes() -> None:
    """The network ends a connection over which a longer message comes, as the real one does."""
    proving = SETTINGS.model_copy(update={"digest": DigestMode.VERIFY})
    layout = KVLayout(model="long", num_layers=1, num_kv_heads=8, head_dim=1, dtype="bfloat16")
    num_blocks = 2**20 // layout.block_size
    engines = Engines(layout, layout, settings=proving, reader_settings=proving, num_blocks=num_blocks)
    holder, blocks = EngineKey("holder", 1), list(range(num_blocks))
    key = LeaseKey(holder, "request", 0, 1)
    ticket = Ticket(
        *(TICKET_VERSION, key, "tcp://holder", layout.fingerprint, "fake", 2**20, 30.0, DigestMode.VERIFY, num_blocks),
        encode_runs(blocks),
    )
    engines.holder.offer(key, blocks, num_blocks)
    engines.reader.receive(2, ticket.encode(), 0, blocks)
    engines.pass_time(300)
    assert [type(event) for event in engines.events] == [Received, OfferEnded]


def test_a_receive_that_is_given_up_begins_no_further_read() -> None:
    two_at_a_time = SETTINGS.model_copy(update={"batch_bytes": OURS.block_bytes, "reads_in_flight": 2})
    engines = Engines(reader_settings=two_at_a_time)
    engines.fabric.faults.read_s = (0.5, 3.0)  # one of two ends first, and leaves room for the third
    engines.meet()
    blocks = [0, 1, 2]
    engines.holder.offer(LeaseKey(EngineKey("holder", 1), "request", 0, 1), blocks, 3)
    ticket = ticket_of(EngineKey("holder", 1))
    ticket = msgspec.structs.replace(ticket, runs=encode_runs(blocks), num_tokens=48, num_ready=3)
    engines.reader.receive(1, ticket.encode(), 0, blocks)
    engines.pass_time(3)
    engines.reader.cancel(1)
    engines.pass_time(40)
    assert BlocksReleased(1) in engines.events
    assert engines.reader.stats().bytes_read == 2 * OURS.block_bytes


def test_a_read_that_stands_still_fails_and_its_lease_is_no_longer_renewed() -> None:
    """Also where both ends hear each other all the while. Its blocks come back when the transport lets them go."""
    engines = Engines(reader_settings=SETTINGS.model_copy(update={"stall_s": 20.0}))
    engines.fabric.faults.read_s = (300.0, 300.0)
    engines.hand_over()
    engines.pass_time(190)
    assert engines.events == []
    engines.pass_time(20)
    failed, ended = engines.events
    assert failed.reason == "the read failed: no part of it has come for 20 s (transfer.stall_s)"
    assert ended == OfferEnded(1, OfferOutcome.WITHDRAWN), "nobody renews it"
    assert engines.reader.stats().blocks_quarantined == 1
    engines.pass_time(3000)
    assert engines.events[2:] == [BlocksReleased(1)]
    assert engines.reader.stats().blocks_quarantined == 0


def test_a_holder_that_closes_asks_its_readers_to_stop_and_waits_for_them() -> None:
    engines = Engines(OURS)
    engines.fabric.faults.read_s = (10.0, 10.0)
    engines.hand_over()
    engines.holder.abandon("closing")
    assert engines.holder.any_access
    engines.pass_time()
    assert ReceiveFailed(1, "the holder withdrew the offer") in engines.events
    assert not engines.holder.any_access


def test_a_holder_serves_on_for_a_reader_that_gave_up_in_mid_read() -> None:
    """Its blocks are quarantined until the read has ended, which over some lanes takes the holder's help."""
    engines = Engines(OURS)
    engines.fabric.faults.read_s = (10.0, 10.0)
    engines.hand_over()
    engines.reader.cancel(1)
    engines.pass_time(30)
    assert OfferEnded(1, OfferOutcome.WITHDRAWN) in engines.events
    assert engines.holder.pump() == POLL_SERVING_S
    engines.pass_time(400)
    assert engines.holder.pump() > POLL_SERVING_S


def test_a_read_that_was_given_up_has_the_holders_help_for_as_long_as_it_takes() -> None:
    """Also of a holder that nobody but a ticket has named. Then both sleep."""
    engines = Engines(helped=True)
    engines.fabric.faults.read_s = (3 * SETTINGS.lease_s, 3 * SETTINGS.lease_s)
    engines.holder.offer(LeaseKey(EngineKey("holder", 1), "request", 0, 1), [1], 1)
    engines.receive(EngineKey("holder", 1))
    engines.pass_time(15)
    engines.reader.cancel(1)
    engines.pass_time(20)
    assert engines.reader.stats().blocks_quarantined == 1
    engines.pass_time(1000)
    assert engines.reader.stats().blocks_quarantined == 0
    assert engines.events[-1] == BlocksReleased(1)
    assert min(engines.reader.pump(), engines.holder.pump()) > POLL_SERVING_S


def test_an_offer_that_nobody_claimed_keeps_nobody_awake() -> None:
    engines = Engines()
    engines.holder.offer(LeaseKey(EngineKey("holder", 1), "request", 0, 1), [1], 1)
    engines.holder.withdraw(1)
    assert engines.holder.pump() > POLL_SERVING_S


def test_bytes_that_are_no_message_are_counted_and_dropped() -> None:
    engines = Engines(OURS)
    link = engines.reader_channel.connect("tcp://holder")
    engines.reader_channel.send(link, b"\xc1 nonsense")
    engines.pass_time(2)
    assert engines.holder.stats().messages_malformed == 1


def test_a_grant_that_comes_while_a_read_is_posted_commits_in_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over shared memory the read is done when it is posted: nothing else is waited for then."""
    engines = Engines()
    engines.meet()
    read, transport = FakeTransport.read, engines.transports["reader"]

    def read_slowly(self: FakeTransport, peer: int, ranges: Sequence[ByteRange]) -> int:
        handle = read(self, peer, ranges)
        engines.holder.pump()  # it takes in the claim and answers
        engines.clock.advance(1.0)
        assert transport.poll(handle) is ReadState.DONE
        return handle

    monkeypatch.setattr(FakeTransport, "read", read_slowly)
    engines.holder.offer(LeaseKey(EngineKey("holder", 1), "request", 0, 1), [1], 1)
    claimed_s = engines.clock()
    engines.reader.receive(1, ticket_of(EngineKey("holder", 1)).encode(), 0, [1])
    engines.clock.advance(0.1)  # the claim is there
    engines.reader.pump()
    (received,) = engines.events
    assert (received.claimed_s, received.pulled_s) == (claimed_s, engines.clock())


def test_the_engines_calls_are_taken_before_the_sockets_are_looked_at_and_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines, order = Engines(), []
    monkeypatch.setattr(engines.reader_channel, "receive", lambda: order.append("sockets") or [])
    engines.reader.pump(lambda: order.append("calls") or [])
    assert order == ["calls", "sockets", "calls"]


def test_an_offer_made_while_messages_are_received_is_found_by_the_claim_among_them() -> None:
    """Whoever sent the claim has the ticket, so the call that makes the offer is on its way at the latest now."""
    engines = Engines()
    engines.meet()
    engines.receive(EngineKey("holder", 1))
    engines.clock.advance(0.1)  # the claim is at the holder's
    key = LeaseKey(EngineKey("holder", 1), "request", 0, 1)
    calls = iter([[], [lambda handoff: handoff.offer(key, [1], 1)]])
    engines.holder.pump(lambda: next(calls))
    assert engines.holder.leases.any_granted
