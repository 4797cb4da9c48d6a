"""One engine's side of all its hand-offs: the state machines, wired to a channel and to the ranks that read.

    engine's calls ─┐                                   ┌─> messages to peers
    messages ───────┼─> LeaseTable, ReceiveTable ─> actions ─> reads of peers' memory
    reads, time ────┘                                   └─> events for the engine

The coordinator has no thread or clock of its own: `TransferConnector` runs it in a thread, tests in virtual time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from baton.engine.core.connector import BlocksReleased, ConnectorEvent, ReceiveFailed, TransferId

from ..channel import Channel, Route
from ..errors import MalformedMessage, TransportError
from ..group.tp_read_group import TpReadGroup
from ..lease_clock import Standstill
from ..pacing import POLL_IDLE_S, pause_s
from ..protocol.leases import LeaseTable
from ..protocol.messages import (
    DIGEST_BLOCKS,
    AbortRead,
    AskDigests,
    Claim,
    ClaimRefused,
    DigestMode,
    Digests,
    EngineKey,
    Finish,
    Granted,
    Grown,
    HandshakeAccepted,
    HandshakeRefused,
    HandshakeRequest,
    LeaseKey,
    Message,
    Renew,
    Withdrawn,
)
from ..protocol.receive_rules import ReceiveOutcome
from ..protocol.receives import ReceiveTable
from ..protocol.stats import TransferStats
from ..protocol.ticket import Ticket
from ..settings import PeerInfo, TransferSettings
from ..transports import PeerHandle
from .digest_check import Compared, DigestCheck, Digested
from .effects import Effects
from .handshake import HandshakeResponder, PairingTerms
from .message_router import MessageRouter
from .peers import Peer, Peers, PeerStatus
from .reads import BlockReads, ReadEvent, ReadOutcome

logger = logging.getLogger(__name__)

LISTEN_EVERY_S = 1.0  # longest pause while blocks are on offer, so that a stopped process knows for how long it was


class HandoffCoordinator:
    """Offers, receives and peers of one engine. One thread calls it, and `emit` gets the events in order.

    `group` reads the blocks on all ranks of the engine's group. Calls raise `RankLost` when a rank is gone.
    """

    def __init__(
        self,
        me: EngineKey,
        channel: Channel,
        group: TpReadGroup,
        settings: TransferSettings,
        clock: Callable[[], float],
        emit: Callable[[ConnectorEvent], None],
        *,
        digest_blocks: int = DIGEST_BLOCKS,
    ) -> None:
        """`clock` is the lease clock (`lease_clock.py`). `digest_blocks` blocks are digested at a time."""
        self.leases = LeaseTable(me, settings.lease_s, digest_blocks)
        self.receives = ReceiveTable(me, settings.timeouts, settings.digest)
        self._terms = PairingTerms.of(me, group, settings.digest)
        self._channel = channel
        self._router = MessageRouter(channel)
        self._group = group
        self._clock = clock
        self._handshakes = HandshakeResponder(self._terms, group, self._router)
        self.peers = Peers(self._terms, channel, group, settings.retry_s)
        self.reads = BlockReads(group, settings.batch_bytes, settings.reads_in_flight, settings.stall_s, clock)
        verifies = settings.digest is DigestMode.VERIFY
        self._digest_check = DigestCheck(group, verifies=verifies, digest_blocks=digest_blocks)
        self._effects = Effects(self._router, self.peers, self.reads, self._digest_check, self.receives, clock, emit)
        self._stale_handshakes = 0
        self._standstill = Standstill()

    # ------------------------------------------------------------------ the engine's calls

    def offer(self, key: LeaseKey, block_ids: Sequence[int], num_ready: int) -> None:
        """Offer blocks of which the first `num_ready` are written. `advance` reports the others."""
        self.leases.offer(key, len(block_ids), self._clock(), num_ready)
        self._digest_check.offered(key.offer, block_ids)
        self._digest_if_complete(key.offer)

    def advance(self, offer: TransferId, num_ready: int, last_blocks: tuple[int, ...] = ()) -> None:
        """Note that `num_ready` blocks are written. `last_blocks` replace as many at the end of the offer."""
        now = self._standstill.arrival(self._clock())
        if last_blocks:
            self._digest_check.replaced(offer, last_blocks)
        self._effects.perform(self.leases.advance(offer, num_ready, now, last_blocks))
        self._digest_if_complete(offer)

    def withdraw(self, offer: TransferId) -> None:
        self._effects.perform(self.leases.withdraw(offer))

    def receive(self, receive: TransferId, ticket: bytes, first_block: int, block_ids: Sequence[int]) -> None:
        now = self._clock()
        try:
            offered = Ticket.decode(ticket)
            self._terms.check(offered, first_block, block_ids)
            peer = self._holder_of(offered, now)
        except (MalformedMessage, TransportError) as error:
            self._refuse(receive, str(error))
            return
        self._effects.receive_begun(receive)
        self.receives.start(receive, offered, first_block, block_ids, now)
        if peer.status is PeerStatus.READY:
            self._effects.perform(self.receives.peer_ready(peer.key, now))

    def _holder_of(self, offered: Ticket, now: float) -> Peer:
        """Return the holder, connecting to it if it is new. Raises `TransportError` if it cannot be read."""
        if offered.refusal:
            raise TransportError(f"{offered.lease.holder.engine_id} offers nothing: {offered.refusal}")
        peer = self.peers.connect(offered.lease.holder, offered.kv_address, now)
        if peer.why_unread:
            raise TransportError(peer.why_unread)
        return peer

    def cancel(self, receive: TransferId) -> None:
        self._effects.perform(self.receives.cancel(receive))

    def peers_changed(self, live: Collection[PeerInfo]) -> None:
        for left in self.peers.departed(live):
            self._effects.perform(
                self.receives.peer_lost(left, f"engine {left.engine_id} (epoch {left.epoch}) left the cluster")
            )
        self.peers.update(live, self._clock())  # which ends the connections over which those that left were told

    # ------------------------------------------------------------------ messages, reads and time

    def pump(self, calls: Callable[[], Iterable[Callable[[HandoffCoordinator], None]]] = tuple) -> float:
        """Do one round of everything. Returns the longest pause in seconds; a message or a call ends it earlier.

        `calls()` returns the engine's calls since it was last asked. The round makes them first, so that claims and
        reads go out at once. It asks again after it has received messages, but before it handles them: a reader that
        sends a claim has the ticket, so the call that makes the offer must be there by then.
        """
        self._standstill.begin_round(self._clock())
        self._make(calls())
        self._group.pump()
        for event in self.reads.poll(self._clock()):  # may copy for a while; the grant arrives meanwhile
            self._on_read_event(event)
        arrived = self._router.receive()
        self._make(calls())
        now = self._clock()  # read after receiving: a lease must not begin before its claim was sent
        for route, message in arrived:
            self._on_message(route, message, now)
        for route in self._channel.lost():
            self._on_connection_lost(route, now)
        for found in self._digest_check.poll():
            self._on_check(found)
        self._effects.perform(self.leases.expire(now))
        self._effects.perform(self.receives.tick(now))
        # Peers come last, because everything above may end a use of a peer's memory.
        for peer in self.peers.poll(now, self._uses, self.reads.given_up):
            self._effects.perform(self.receives.peer_ready(peer, now))
        self.peers.forget_idle(self.receives.waits_for, self._uses)
        if self._serving(now):
            self._group.progress()
        pause = self._pause(now)
        self._standstill.end_round(pause)
        return pause

    def abandon(self, reason: str) -> None:
        """Fail all receives, begin no further reads for them, and withdraw all offers."""
        self._effects.perform(self.receives.abandon(reason))
        self._effects.perform(self.leases.withdraw_all())

    @property
    def any_access(self) -> bool:
        """True while a transport may still write into our blocks, or a peer with a grant may still read them."""
        return len(self.reads) > 0 or self.leases.any_granted

    def stats(self) -> TransferStats:
        return TransferStats(
            offers={outcome.value: count for outcome, count in self.leases.outcomes.items()},
            receives={outcome.value: count for outcome, count in self.receives.outcomes.items()},
            leases_held=len(self.leases),
            blocks_held=self.leases.num_blocks,
            receives_active=self.receives.num_active,
            blocks_quarantined=self.receives.num_quarantined_blocks,
            bytes_read=self._group.num_bytes,
            descriptors_read=self._group.num_descriptors,
            blocks_read_early=self.reads.num_early,
            receive_seconds=self._effects.receive_seconds,
            messages_stale=self.leases.stale_messages + self.receives.stale_messages + self._stale_handshakes,
            messages_malformed=self._router.malformed,
            messages_unsent=self._router.unsent,
            peers_ready=self.peers.num_ready,
            lanes=self.peers.lanes(self.reads),
            reads_fallen_back=self._group.num_fallbacks,
        )

    # ------------------------------------------------------------------ events in

    def _on_message(self, route: Route, message: Message, now: float) -> None:
        match message:
            case HandshakeRequest():
                self._handshakes.answer(route, message, now)
            case HandshakeAccepted():
                self._stale_handshakes += not self.peers.on_accepted(route, message, now)
            case HandshakeRefused():
                self._on_handshake_refused(route, message)
            case Claim() | Renew() | AskDigests() | Finish() | AbortRead():
                self._router.remember(message.reader.engine, route)
                self._effects.perform(self.leases.on_message(message, now, self._standstill.arrival(now)))
            case Granted() | Grown() | ClaimRefused() | Withdrawn() | Digests():
                self._effects.perform(self.receives.on_message(message, now))

    def _on_handshake_refused(self, route: Route, message: HandshakeRefused) -> None:
        peer = self.peers.on_refused(route, message)
        if peer is None:
            self._stale_handshakes += 1
        else:
            self._effects.perform(
                self.receives.peer_lost(peer.key, f"{peer.key.engine_id} refuses to pair: {message.reason}")
            )

    def _on_connection_lost(self, route: Route, now: float) -> None:
        peer = self.peers.connection_lost(route, now)
        if peer is not None:
            where = f"{peer.key.engine_id} at {peer.address}"
            logger.warning("the connection to %s is lost: it ended, or is silent", where)
            self._effects.perform(self.receives.peer_lost(peer.key, f"{where} ended, or is silent"))

    def _on_read_event(self, event: ReadEvent) -> None:
        match event.outcome:
            case ReadOutcome.FINISHED:
                self._effects.perform(self.receives.read_finished(event.receive, self._clock()))
            case ReadOutcome.FAILED:
                self._on_read_failed(event)
            case ReadOutcome.RELEASED:
                self._effects.perform(self.receives.read_released(event.receive))

    def _on_read_failed(self, event: ReadEvent) -> None:
        """Fail a receive. If the peer's memory is lost, also fail all others that read from it."""
        lost = self.peers.broke(self.receives[event.receive].ticket.lease.holder, self._clock())
        self._effects.perform(self.receives.read_failed(event.receive, event.reason))
        for receive in [] if lost is None else self.reads.of(lost):
            self._effects.perform(self.receives.read_failed(receive, event.reason))

    def _uses(self, memory: PeerHandle) -> bool:
        return self.reads.uses(memory) or self._digest_check.uses(memory)

    def _on_check(self, found: Digested | Compared) -> None:
        match found:
            case Digested():
                self.leases.set_digests(found.offer, found.by_rank)
            case Compared(receive, ""):
                self._effects.perform(self.receives.matched(receive, self._clock()))
            case Compared(receive, objection):
                logger.error("receive %d is corrupt: %s", receive, objection)
                self._effects.perform(self.receives.corrupt(receive, objection))

    # ------------------------------------------------------------------ helpers

    def _digest_if_complete(self, offer: TransferId) -> None:
        lease = self.leases.get(offer)
        if lease is not None and not lease.grows:
            self._digest_check.written(offer)

    def _make(self, calls: Iterable[Callable[[HandoffCoordinator], None]]) -> None:
        for call in calls:
            call(self)

    def _refuse(self, receive: TransferId, reason: str) -> None:
        self.receives.outcomes[ReceiveOutcome.REFUSED] += 1
        self._effects.emit(ReceiveFailed(receive, reason))
        self._effects.emit(BlocksReleased(receive))

    def _serving(self, now: float) -> bool:
        return self._handshakes.is_serving(now) or self.leases.any_granted

    def _pause(self, now: float) -> float:
        soon = pause_s(
            now,
            self._effects.read_started_at if self.reads.any_busy else None,
            self.receives.claimed_at,
            device=self._group.device,
            warming_since=now if self._digest_check.any_digesting else self.peers.warming_since,
            serving=self._serving(now),
        )
        if soon is not None:
            return soon
        listen_at = now + LISTEN_EVERY_S if len(self.leases) else None
        due = (listen_at, self.leases.next_expiry, self.receives.next_deadline, self.peers.next_handshake)
        return max(0.0, min((at - now for at in due if at is not None), default=POLL_IDLE_S))
