"""One engine's side of all its hand-offs: the state machines, wired to a channel and to the ranks that read.

    engine's calls ─┐                                   ┌─> messages to peers
    messages ───────┼─> LeaseTable, ReceiveTable ─> actions ─> reads of peers' memory
    reads, time ────┘                                   └─> events for the engine

No threads, no sleeping, no clock of its own: `TransferConnector` runs it in a thread, tests run it in virtual time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

import msgspec

from baton.engine.core.connector import (
    BlocksReleased,
    ConnectorEvent,
    OfferEnded,
    OfferOutcome,
    Received,
    ReceiveFailed,
    TransferId,
)

from .actions import Action, Emit, SendToHolder, SendToReader, StartRead, StopRead
from .channel import Channel, Route
from .crew import Crew
from .errors import MalformedMessage, TransportError
from .leases import LeaseTable
from .messages import (
    Abort,
    Claim,
    EngineKey,
    Finish,
    Granted,
    Hello,
    LeaseKey,
    Message,
    Refused,
    Renew,
    Ticket,
    Unwelcome,
    Welcome,
    Withdrawn,
    decode,
    encode,
)
from .pacing import POLL_IDLE_S, pause_s
from .peers import Myself, Peers, PeerStatus
from .pulls import PullEvent, PullOutcome, Pulls
from .receives import ReceiveTable
from .settings import PeerInfo, TransferSettings

logger = logging.getLogger(__name__)

SERVE_AFTER_HELLO_S = 2.0  # a peer that greets reads a little at once
MAX_READER_ROUTES = 4096


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """Of one engine. Counters run from the process's start."""

    offers: dict[str, int] = {}  # ended ones by outcome: finished, withdrawn, expired
    receives: dict[str, int] = {}  # by outcome: received, refused, withdrawn, expired, failed, lost, cancelled
    leases_held: int = 0
    blocks_held: int = 0
    receives_active: int = 0  # including quarantined ones
    blocks_quarantined: int = 0
    bytes_read: int = 0
    descriptors_read: int = 0
    receive_seconds: float = 0.0  # summed over those that were received, from the engine's call to the commit
    messages_stale: int = 0  # of another epoch or generation, or after the end: dropped
    messages_malformed: int = 0
    messages_unsent: int = 0
    peers_ready: int = 0


class Handoff:
    """Offers, receives and peers of one engine. One thread calls it; `emit` gets events in their order.

    `crew` moves the blocks, on all ranks of the engine's group. Calls raise `RankLost` when one of those is gone.
    """

    def __init__(
        self,
        me: EngineKey,
        channel: Channel,
        crew: Crew,
        settings: TransferSettings,
        clock: Callable[[], float],
        emit: Callable[[ConnectorEvent], None],
    ) -> None:
        self.me = me
        self.leases = LeaseTable(me, settings.lease_s)
        self.receives = ReceiveTable(me, settings.patience)
        self._fingerprint = crew.layout.fingerprint
        self._channel = channel
        self._crew = crew
        self._clock = clock
        self._emit_event = emit
        self._peers = Peers(Myself(me, self._fingerprint), channel, crew, settings.retry_s)
        self._pulls = Pulls(crew, settings.batch_bytes, settings.reads_in_flight)
        self._reader_routes: dict[EngineKey, Route] = {}
        self._started_at: dict[TransferId, float] = {}
        self._serve_until = 0.0
        self._read_started_at = 0.0  # the youngest one
        self._receive_seconds = 0.0
        self._stale_greetings = 0
        self._malformed = 0
        self._unsent = 0

    # ------------------------------------------------------------------ the engine's calls

    def offer(self, key: LeaseKey, num_blocks: int) -> None:
        self.leases.offer(key, num_blocks, self._clock())

    def withdraw(self, offer: TransferId) -> None:
        self._perform(self.leases.withdraw(offer))

    def receive(self, receive: TransferId, ticket: bytes, first_block: int, block_ids: Sequence[int]) -> None:
        try:
            offered = self._checked(Ticket.decode(ticket), first_block, block_ids)
        except MalformedMessage as error:
            self._refuse(receive, str(error))
            return
        now = self._clock()
        try:
            peer = self._peers.connect(offered.lease.holder, offered.kv_address, now)
        except TransportError as error:
            self._refuse(receive, str(error))
            return
        if peer.status is PeerStatus.REFUSED:
            self._refuse(receive, f"{peer.key.engine_id} refuses to pair: {peer.refusal}")
            return
        self._started_at[receive] = now
        self.receives.start(receive, offered, first_block, block_ids, now)
        if peer.status is PeerStatus.READY:
            self._perform(self.receives.peer_ready(peer.key, now))

    def cancel(self, receive: TransferId) -> None:
        self._perform(self.receives.cancel(receive))

    def peers_changed(self, live: Collection[PeerInfo]) -> None:
        for left in self._peers.changed(live, self._clock()):
            self._perform(
                self.receives.peer_lost(left, f"engine {left.engine_id} (epoch {left.epoch}) left the cluster")
            )

    # ------------------------------------------------------------------ the world's doings

    def pump(self) -> float:
        """One round of everything. Returns after how many seconds to call again, unless a message or a call comes."""
        self._crew.pump()
        for event in self._pulls.poll():  # first: the engine's last calls may have asked for reads
            self._on_pull(event)
        arrived = self._channel.receive()
        now = self._clock()  # after receiving: a lease must not be counted from before the claim was sent
        for route, data in arrived:
            self._on_data(route, data, now)
        for peer in self._peers.poll(now, self._pulls.uses):
            self._perform(self.receives.peer_ready(peer, now))
        self._perform(self.leases.expire(now))
        self._perform(self.receives.tick(now))
        self._peers.forget_idle(self.receives.waits_for)
        if self._serving(now):
            self._crew.progress()
        return self._pause(now)

    def abandon(self, reason: str) -> None:
        """Fails all receives that are under way, whose reads begin nothing further, and withdraws all offers."""
        self._perform(self.receives.abandon(reason))
        self._perform(self.leases.withdraw_all())

    @property
    def any_access(self) -> bool:
        """A rank's transport may still write into our blocks, or a peer with our promise may still read them."""
        return len(self._pulls) > 0 or self.leases.any_granted

    def stats(self) -> TransferStats:
        return TransferStats(
            offers={outcome.value: count for outcome, count in self.leases.outcomes.items()},
            receives=dict(self.receives.outcomes),
            leases_held=len(self.leases),
            blocks_held=self.leases.num_blocks,
            receives_active=len(self.receives),
            blocks_quarantined=self.receives.num_quarantined_blocks,
            bytes_read=self._crew.num_bytes,
            descriptors_read=self._crew.num_descriptors,
            receive_seconds=self._receive_seconds,
            messages_stale=self.leases.stale_messages + self.receives.stale_messages + self._stale_greetings,
            messages_malformed=self._malformed,
            messages_unsent=self._unsent,
            peers_ready=self._peers.num_ready,
        )

    # ------------------------------------------------------------------ events in

    def _on_data(self, route: Route, data: bytes, now: float) -> None:
        try:
            message = decode(data)
        except MalformedMessage as error:
            self._malformed += 1
            logger.warning("dropped: %s", error)
            return
        match message:
            case Hello():
                self._on_hello(route, message, now)
            case Welcome():
                self._stale_greetings += not self._peers.on_welcome(route, message, now)
            case Unwelcome():
                self._on_unwelcome(route, message)
            case Claim() | Renew() | Finish() | Abort():
                self._remember_route(message.reader.engine, route)
                self._perform(self.leases.on_message(message, now))
            case Granted() | Refused() | Withdrawn():
                self._perform(self.receives.on_message(message, now))

    def _on_hello(self, route: Route, hello: Hello, now: float) -> None:
        reason = self._objection(hello)
        if reason:
            self._send(route, Unwelcome(hello.to, hello.sender, reason))
            return
        self._serve_until = max(self._serve_until, now + SERVE_AFTER_HELLO_S)
        self._send(route, Welcome(self.me, hello.sender, self._crew.metadata()))

    def _objection(self, hello: Hello) -> str:
        if hello.to != self.me:
            return f"engine {hello.to.engine_id} (epoch {hello.to.epoch}) is gone; here is {self.me.engine_id}"
        if hello.fingerprint != self._fingerprint:
            return f"its KV layout is {self._fingerprint}, the reader's is {hello.fingerprint}"
        if hello.transport != self._crew.transport_name:
            return f"its transport is {self._crew.transport_name}, the reader's is {hello.transport}"
        return ""

    def _on_unwelcome(self, route: Route, message: Unwelcome) -> None:
        peer = self._peers.on_unwelcome(route, message)
        if peer is None:
            self._stale_greetings += 1
        else:
            self._perform(self.receives.peer_lost(peer.key, f"{peer.key.engine_id} refuses to pair: {message.reason}"))

    def _on_pull(self, event: PullEvent) -> None:
        match event.outcome:
            case PullOutcome.FINISHED:
                self._perform(self.receives.read_finished(event.receive, self._clock()))
            case PullOutcome.FAILED:
                self._peers.broke(self.receives[event.receive].ticket.lease.holder, self._clock())
                self._perform(self.receives.read_failed(event.receive, event.reason))
            case PullOutcome.RELEASED:
                self._perform(self.receives.read_released(event.receive))

    # ------------------------------------------------------------------ actions out

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Emit():
                    self._emit(action.event)
                case SendToReader():
                    self._send(self._reader_routes.get(action.to), action.message)
                case SendToHolder():
                    peer = self._peers.get(action.to)
                    self._send(peer.route if peer else None, action.message)
                case StartRead():
                    self._start_read(action.receive)
                case StopRead():
                    self._pulls.stop(action.receive)

    def _emit(self, event: ConnectorEvent) -> None:
        if isinstance(event, Received):
            self._receive_seconds += self._clock() - self._started_at.pop(event.transfer_id)
        elif isinstance(event, BlocksReleased):
            self._started_at.pop(event.transfer_id, None)
        elif isinstance(event, OfferEnded) and event.outcome is not OfferOutcome.FINISHED:
            self._serve_until = self._clock() + self.leases.lease_s  # who gave up may still read, and waits for the end
        self._emit_event(event)

    def _start_read(self, receive: TransferId) -> None:
        known = self.receives[receive]
        peer = self._peers.get(known.ticket.lease.holder)
        assert peer is not None, "a read starts when its peer is ready"
        assert peer.memory is not None, "a read starts when its peer is ready"
        self._pulls.start(receive, peer.memory, known.source_blocks, known.block_ids)
        self._read_started_at = self._clock()

    def _send(self, route: Route | None, message: Message) -> None:
        if route is None or not self._channel.send(route, encode(message)):
            self._unsent += 1

    def _remember_route(self, reader: EngineKey, route: Route) -> None:
        self._reader_routes.pop(reader, None)
        self._reader_routes[reader] = route
        if len(self._reader_routes) > MAX_READER_ROUTES:
            del self._reader_routes[next(iter(self._reader_routes))]

    # ------------------------------------------------------------------ helpers

    def _checked(self, ticket: Ticket, first_block: int, block_ids: Sequence[int]) -> Ticket:
        """Raises `MalformedMessage` for a ticket that this engine cannot use for these blocks."""
        if ticket.fingerprint != self._fingerprint:
            raise MalformedMessage(f"the ticket's KV layout is {ticket.fingerprint}, this engine's {self._fingerprint}")
        if ticket.transport != self._crew.transport_name:
            raise MalformedMessage(
                f"the ticket is for transport {ticket.transport}, here is {self._crew.transport_name}"
            )
        ticket.check_block_size(self._crew.layout.block_size)
        wanted = ticket.num_blocks - first_block
        if first_block < 0 or wanted != len(block_ids):
            raise MalformedMessage(
                f"the ticket offers {ticket.num_blocks} blocks; from block {first_block} on that is {wanted},"
                f" but {len(block_ids)} are to be filled"
            )
        if any(not 0 <= block < self._crew.num_blocks for block in block_ids):
            raise MalformedMessage(f"a block to be filled is outside this engine's {self._crew.num_blocks}")
        return ticket

    def _refuse(self, receive: TransferId, reason: str) -> None:
        self.receives.outcomes["refused"] += 1
        self._emit(ReceiveFailed(receive, reason))
        self._emit(BlocksReleased(receive))

    def _serving(self, now: float) -> bool:
        return now < self._serve_until or self.leases.any_granted

    def _pause(self, now: float) -> float:
        soon = pause_s(
            now,
            self._read_started_at if self._pulls else None,
            warming=self._peers.any_warming,
            serving=self._serving(now),
        )
        if soon is not None:
            return soon
        due = (self.leases.next_expiry, self.receives.next_deadline, self._peers.next_greeting)
        return max(0.0, min((at - now for at in due if at is not None), default=POLL_IDLE_S))
