"""HandshakeResponder between two engines over the fakes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
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
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.kv_transfer.group.rank_reader import RankReader
from baton.kv_transfer.group.tp_read_group import TpReadGroup
from baton.kv_transfer.handoff.coordinator import LISTEN_EVERY_S, HandoffCoordinator
from baton.kv_transfer.handoff.peers import MAX_HANDSHAKE_PAUSE_S
from baton.kv_transfer.lease_clock import STOOD_STILL_S
from baton.kv_transfer.pacing import POLL_SERVING_S
from baton.kv_transfer.protocol.messages import (
    TICKET_VERSION,
    DigestMode,
    EngineKey,
    HandshakeRequest,
    LeaseKey,
    Ticket,
    encode,
    runs_of,
)
from baton.kv_transfer.settings import PeerInfo, TransferSettings
from baton.kv_transfer.transports import ByteRange, ReadState

from ...helpers.fake_channel import FakeNetwork
from ...helpers.fake_transport import FakeFabric, FakeTransport
from ...helpers.virtual_clock import VirtualClock

SETTINGS = TransferSettings()
OURS = KVLayout(model="ours", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
THEIRS = KVLayout(model="theirs", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")


class Engines:
    def __init__(
        self,
        holder_layout: KVLayout = OURS,
        reader_layout: KVLayout = OURS,
        transport: str = "fake",
        settings: TransferSettings = SETTINGS,
        reader_settings: TransferSettings = SETTINGS,
        num_blocks: int = 4,
        *,
        helped: bool = False,
    ) -> None:
        """What the holder is like, and how the reader reads. `helped`: only with the holder's help, as over TCP."""
        self.num_blocks = num_blocks
        self.clock = VirtualClock()
        self.network = FakeNetwork(self.clock, random.Random(0))
        self.fabric = FakeFabric(self.clock, random.Random(0), helped=helped)
        self.events: list[ConnectorEvent] = []
        self.transports: dict[str, FakeTransport] = {}
        self.holder = self.engine("holder", holder_layout, transport, settings)
        self.reader = self.engine("reader", reader_layout, "fake", reader_settings)
        self.reader_channel = self.network.bound("tcp://reader")

    def engine(
        self, name: str, layout: KVLayout, transport_name: str, settings: TransferSettings
    ) -> HandoffCoordinator:
        size, memory = layout.block_bytes, bytearray(self.num_blocks * layout.block_bytes)
        transport = self.fabric.attach(name, memory)
        transport.name = transport_name
        self.transports[name] = transport
        channel = self.network.bind(f"tcp://{name}")
        region = CacheRegion.of(ArenaRegion(0, self.num_blocks, "cpu", layout, 0, layout.num_kv_heads))
        group = TpReadGroup(RankReader(0, region, transport, lambda block: memory[block * size : (block + 1) * size]))
        return HandoffCoordinator(EngineKey(name, 1), channel, group, settings, self.clock, self.events.append)

    def pass_time(self, rounds: int = 20) -> None:
        for _ in range(rounds):
            self.clock.advance(0.1)
            self.reader.pump()
            self.holder.pump()

    def meet(self) -> None:
        self.reader.peers_changed([PeerInfo("holder", 1, "tcp://holder", OURS.fingerprint)])
        self.pass_time()
        assert self.reader.stats().peers_ready == 1

    def hand_over(self) -> None:
        """Begins to read block 1."""
        self.meet()
        self.holder.offer(LeaseKey(EngineKey("holder", 1), "request", 0, 1), [1], 1)
        self.receive(EngineKey("holder", 1))
        self.pass_time(3)

    def receive(self, holder: EngineKey, block: int = 1) -> None:
        self.reader.receive(1, ticket_of(holder, block).encode(), 0, [1])


def ticket_of(holder: EngineKey, block: int = 1) -> Ticket:
    lease = LeaseKey(holder, "request", 0, 1)
    runs = runs_of([block])
    return Ticket(TICKET_VERSION, lease, "tcp://holder", OURS.fingerprint, "fake", 16, 30.0, DigestMode.OFF, 1, runs)


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
        ticket_of(holder), lease=LeaseKey(holder, "grows", 0, 7), runs=runs_of([2]), num_ready=0
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
        runs_of(blocks),
    )
    engines.holder.offer(key, blocks, num_blocks)
    engines.reader.receive(2, ticket.encode(), 0, blocks)
    engines.pass_time(300)
    assert [type(event) for event in engines.events] == [Received, OfferEnded]


def test_a_peer_that_left_the_cluster_is_forgotten_and_what_is_read_of_it_fails_at_once() -> None:
    engines = Engines(OURS)
    engines.fabric.faults.read_s = (5.0, 5.0)
    engines.hand_over()
    engines.reader.peers_changed([])
    (failed,) = engines.events
    assert failed == ReceiveFailed(1, "engine holder (epoch 1) left the cluster")
    assert (engines.reader.stats().peers_ready, engines.reader.stats().blocks_quarantined) == (0, 1)
    engines.pass_time(60)
    assert engines.events[1:] == [BlocksReleased(1)]
    assert engines.reader.stats().peers_ready == 0


def test_a_receive_that_is_given_up_begins_no_further_read() -> None:
    two_at_a_time = SETTINGS.model_copy(update={"batch_bytes": OURS.block_bytes, "reads_in_flight": 2})
    engines = Engines(reader_settings=two_at_a_time)
    engines.fabric.faults.read_s = (0.5, 3.0)  # one of two ends first, and leaves room for the third
    engines.meet()
    blocks = [0, 1, 2]
    engines.holder.offer(LeaseKey(EngineKey("holder", 1), "request", 0, 1), blocks, 3)
    ticket = ticket_of(EngineKey("holder", 1))
    ticket = msgspec.structs.replace(ticket, runs=runs_of(blocks), num_tokens=48, num_ready=3)
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


def stop_the_holder(engines: Engines, seconds: float, *, num_ready: int = 1) -> None:
    """An offer, a pause of the holder's process, a claim right after it began; the reader gives up and is not heard."""
    engines.meet()
    engines.holder.offer(LeaseKey(EngineKey("holder", 1), "request", 0, 1), [1], num_ready)
    engines.clock.advance(engines.holder.pump())
    engines.holder.pump()
    engines.receive(EngineKey("holder", 1))
    engines.reader.pump()
    engines.clock.advance(seconds)


def test_a_holder_that_stood_still_counts_a_claim_from_when_it_may_have_come() -> None:
    engines = Engines()
    stop_the_holder(engines, 20.0)
    engines.holder.pump()
    lease = engines.holder.leases.get(1)
    assert lease is not None
    assert 30.0 <= lease.expires_at - (engines.clock() - 20.0) < 30.0 + 2 * LISTEN_EVERY_S


def test_a_holder_that_stood_still_for_longer_than_a_lease_refuses_what_waited() -> None:
    engines = Engines()
    stop_the_holder(engines, 40.0)
    engines.holder.pump()
    assert engines.events == [OfferEnded(1, OfferOutcome.EXPIRED)]
    assert not engines.holder.leases.any_granted


def test_a_claim_that_reaches_python_a_moment_after_the_wake_waited_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of libzmq wake up with ours."""
    engines = Engines()
    stop_the_holder(engines, 20.0)
    channel = engines.network.bound("tcp://holder")
    with monkeypatch.context() as patched:
        patched.setattr(channel, "receive", lambda: [])
        engines.clock.advance(engines.holder.pump() / 2)
    engines.holder.pump()
    lease = engines.holder.leases.get(1)
    assert lease is not None
    assert lease.expires_at - engines.clock() < 30.0 - 20.0 + 2 * LISTEN_EVERY_S


def test_growth_that_waited_with_the_process_does_not_revive_a_lease() -> None:
    engines = Engines()
    stop_the_holder(engines, 40.0, num_ready=0)
    engines.holder.pump(lambda: [lambda handoff: handoff.advance(1, 1)])
    assert engines.events == [OfferEnded(1, OfferOutcome.EXPIRED)]


def test_a_holder_that_was_only_busy_grants_the_whole_lease() -> None:
    engines = Engines()
    stop_the_holder(engines, STOOD_STILL_S / 2)
    engines.holder.pump()
    assert engines.holder.leases.get(1).expires_at == engines.clock() + 30.0
