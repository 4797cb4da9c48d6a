"""One engine's side of all its hand-offs: the state machines, wired to a channel and to the ranks that read.

    engine's calls ─┐                                   ┌─> messages to peers
    messages ───────┼─> LeaseTable, ReceiveTable ─> actions ─> reads of peers' memory
    reads, time ────┘                                   └─> events for the engine

No threads, no sleeping, no clock of its own: `TransferConnector` runs it in a thread, tests run it in virtual time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from baton.engine.core.connector import BlocksReleased, ConnectorEvent, ReceiveFailed, TransferId

from ..errors import MalformedMessage, TransportError
from ..group.crew import Crew
from ..lease_clock import Standstill
from ..net.channel import Channel, Route
from ..pacing import POLL_IDLE_S, pause_s
from ..protocol.leases import LeaseTable
from ..protocol.messages import (
    DIGEST_BLOCKS,
    Abort,
    AskDigests,
    Claim,
    DigestMode,
    Digests,
    EngineKey,
    Finish,
    Granted,
    Grown,
    Hello,
    LeaseKey,
    Message,
    Refused,
    Renew,
    Ticket,
    Unwelcome,
    Welcome,
    Withdrawn,
)
from ..protocol.receive_table import ReceiveOutcome
from ..protocol.receives import ReceiveTable
from ..protocol.stats import TransferStats
from ..settings import PeerInfo, TransferSettings
from ..transports import PeerHandle
from .digest_check import Compared, Digested, Proofs
from .effects import Deeds
from .handshake import Greetings, Pairing
from .message_router import Mail
from .peers import Peers, PeerStatus
from .reads import PullEvent, PullOutcome, Pulls

logger = logging.getLogger(__name__)

LISTEN_EVERY_S = 1.0  # while blocks are on offer, so that a holder that stood still knows for how long


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
        *,
        digest_blocks: int = DIGEST_BLOCKS,
    ) -> None:
        """`clock`: leases are counted by it (`lease_clock.py`). `digest_blocks`: so many are digested at a time."""
        self.leases = LeaseTable(me, settings.lease_s, digest_blocks)
        self.receives = ReceiveTable(me, settings.patience, settings.digest)
        self._pairing = Pairing.of(me, crew, settings.digest)
        self._channel = channel
        self._mail = Mail(channel)
        self._crew = crew
        self._clock = clock
        self._greetings = Greetings(self._pairing, crew, self._mail)
        self._peers = Peers(self._pairing, channel, crew, settings.retry_s)
        self._pulls = Pulls(crew, settings.batch_bytes, settings.reads_in_flight, settings.stall_s)
        verifies = settings.digest is DigestMode.VERIFY
        self._proofs = Proofs(crew, verifies=verifies, digest_blocks=digest_blocks)
        self._deeds = Deeds(self._mail, self._peers, self._pulls, self._proofs, self.receives, clock, emit)
        self._stale_greetings = 0
        self._standstill = Standstill()

    # ------------------------------------------------------------------ the engine's calls

    def offer(self, key: LeaseKey, block_ids: Sequence[int], num_ready: int) -> None:
        """The first `num_ready` blocks are written. `advance` tells of the others."""
        self.leases.offer(key, len(block_ids), self._clock(), num_ready)
        self._proofs.offered(key.offer, block_ids)
        self._digest_if_complete(key.offer)

    def advance(self, offer: TransferId, num_ready: int) -> None:
        self._deeds.perform(self.leases.advance(offer, num_ready, self._standstill.arrival(self._clock())))
        self._digest_if_complete(offer)

    def withdraw(self, offer: TransferId) -> None:
        self._deeds.perform(self.leases.withdraw(offer))

    def receive(self, receive: TransferId, ticket: bytes, first_block: int, block_ids: Sequence[int]) -> None:
        try:
            offered = self._pairing.check(Ticket.decode(ticket), first_block, block_ids)
        except MalformedMessage as error:
            self._refuse(receive, str(error))
            return
        if offered.refusal:
            self._refuse(receive, f"{offered.lease.holder.engine_id} offers nothing: {offered.refusal}")
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
        if peer.is_cut_off:
            self._refuse(receive, f"{peer.key.engine_id} at {peer.address} is cut off")
            return
        self._deeds.asked(receive)
        self.receives.start(receive, offered, first_block, block_ids, now)
        if peer.status is PeerStatus.READY:
            self._deeds.perform(self.receives.peer_ready(peer.key, now))

    def cancel(self, receive: TransferId) -> None:
        self._deeds.perform(self.receives.cancel(receive))

    def peers_changed(self, live: Collection[PeerInfo]) -> None:
        for left in self._peers.changed(live, self._clock()):
            self._deeds.perform(
                self.receives.peer_lost(left, f"engine {left.engine_id} (epoch {left.epoch}) left the cluster")
            )

    # ------------------------------------------------------------------ the world's doings

    def pump(self, calls: Callable[[], Iterable[Callable[[Handoff], None]]] = tuple) -> float:
        """One round of everything. Returns after how many seconds to call again, unless a message or a call comes.

        `calls`: takes those of the engine that came since it was last asked. First of all, so that claims and reads go
        out at once; and again behind the messages, before these are looked at. Whoever sent one may hold the ticket of
        an offer that was still on its way here: its claim is read after the offer is made.
        """
        self._standstill.begin_round(self._clock())
        self._make(calls())
        self._crew.pump()
        for event in self._pulls.poll(self._clock()):  # may copy for a while: the grant is there when it is done
            self._on_pull(event)
        arrived = self._mail.receive()
        self._make(calls())
        now = self._clock()  # after receiving: a lease must not be counted from before the claim was sent
        for route, message in arrived:
            self._on_message(route, message, now)
        for route in self._channel.lost():
            self._on_cut_off(route, now)
        for found in self._proofs.poll():
            self._on_proof(found)
        self._deeds.perform(self.leases.expire(now))
        self._deeds.perform(self.receives.tick(now))
        # Behind whatever ends a use of a memory.
        for peer in self._peers.poll(now, self._uses, self._pulls.given_up):
            self._deeds.perform(self.receives.peer_ready(peer, now))
        self._peers.forget_idle(self.receives.waits_for, self._uses)
        if self._serving(now):
            self._crew.progress()
        pause = self._pause(now)
        self._standstill.end_round(pause)
        return pause

    def abandon(self, reason: str) -> None:
        """Fails all receives that are under way, whose reads begin nothing further, and withdraws all offers."""
        self._deeds.perform(self.receives.abandon(reason))
        self._deeds.perform(self.leases.withdraw_all())

    @property
    def any_access(self) -> bool:
        """A rank's transport may still write into our blocks, or a peer with our promise may still read them."""
        return len(self._pulls) > 0 or self.leases.any_granted

    def stats(self) -> TransferStats:
        return TransferStats(
            offers={outcome.value: count for outcome, count in self.leases.outcomes.items()},
            receives={outcome.value: count for outcome, count in self.receives.outcomes.items()},
            leases_held=len(self.leases),
            blocks_held=self.leases.num_blocks,
            receives_active=self.receives.num_active,
            blocks_quarantined=self.receives.num_quarantined_blocks,
            bytes_read=self._crew.num_bytes,
            descriptors_read=self._crew.num_descriptors,
            blocks_read_early=self._pulls.num_early,
            receive_seconds=self._deeds.receive_seconds,
            messages_stale=self.leases.stale_messages + self.receives.stale_messages + self._stale_greetings,
            messages_malformed=self._mail.malformed,
            messages_unsent=self._mail.unsent,
            peers_ready=self._peers.num_ready,
        )

    # ------------------------------------------------------------------ events in

    def _on_message(self, route: Route, message: Message, now: float) -> None:
        match message:
            case Hello():
                self._greetings.answer(route, message, now)
            case Welcome():
                self._stale_greetings += not self._peers.on_welcome(route, message, now)
            case Unwelcome():
                self._on_unwelcome(route, message)
            case Claim() | Renew() | AskDigests() | Finish() | Abort():
                self._mail.remember(message.reader.engine, route)
                self._deeds.perform(self.leases.on_message(message, now, self._standstill.arrival(now)))
            case Granted() | Grown() | Refused() | Withdrawn() | Digests():
                self._deeds.perform(self.receives.on_message(message, now))

    def _on_unwelcome(self, route: Route, message: Unwelcome) -> None:
        peer = self._peers.on_unwelcome(route, message)
        if peer is None:
            self._stale_greetings += 1
        else:
            self._deeds.perform(
                self.receives.peer_lost(peer.key, f"{peer.key.engine_id} refuses to pair: {message.reason}")
            )

    def _on_cut_off(self, route: Route, now: float) -> None:
        peer = self._peers.cut_off(route, now)
        if peer is not None:
            where = f"{peer.key.engine_id} at {peer.address}"
            logger.warning("%s is cut off: it ended, or is silent", where)
            self._deeds.perform(self.receives.peer_cut_off(peer.key, f"{where} ended, or is silent"))

    def _on_pull(self, event: PullEvent) -> None:
        match event.outcome:
            case PullOutcome.FINISHED:
                self._deeds.perform(self.receives.read_finished(event.receive, self._clock()))
            case PullOutcome.FAILED:
                self._on_failed_pull(event)
            case PullOutcome.RELEASED:
                self._deeds.perform(self.receives.read_released(event.receive))

    def _on_failed_pull(self, event: PullEvent) -> None:
        """Where the peer's memory is lost with it, whoever waits for more of that would only fail later."""
        lost = self._peers.broke(self.receives[event.receive].ticket.lease.holder, self._clock())
        self._deeds.perform(self.receives.read_failed(event.receive, event.reason))
        for receive in [] if lost is None else self._pulls.of(lost):
            self._deeds.perform(self.receives.read_failed(receive, event.reason))

    def _uses(self, memory: PeerHandle) -> bool:
        return self._pulls.uses(memory) or self._proofs.uses(memory)

    def _on_proof(self, found: Digested | Compared) -> None:
        match found:
            case Digested():
                self.leases.know_digests(found.offer, found.by_rank)
            case Compared(receive, ""):
                self._deeds.perform(self.receives.matched(receive, self._clock()))
            case Compared(receive, objection):
                logger.error("receive %d is corrupt: %s", receive, objection)
                self._deeds.perform(self.receives.corrupt(receive, objection))

    # ------------------------------------------------------------------ helpers

    def _digest_if_complete(self, offer: TransferId) -> None:
        lease = self.leases.get(offer)
        if lease is not None and not lease.grows:
            self._proofs.written(offer)

    def _make(self, calls: Iterable[Callable[[Handoff], None]]) -> None:
        for call in calls:
            call(self)

    def _refuse(self, receive: TransferId, reason: str) -> None:
        self.receives.outcomes[ReceiveOutcome.REFUSED] += 1
        self._deeds.tell(ReceiveFailed(receive, reason))
        self._deeds.tell(BlocksReleased(receive))

    def _serving(self, now: float) -> bool:
        return self._greetings.any_lately(now) or self.leases.any_granted

    def _pause(self, now: float) -> float:
        soon = pause_s(
            now,
            self._deeds.read_started_at if self._pulls.any_busy else None,
            self.receives.claimed_at,
            device=self._crew.device,
            warming_since=now if self._proofs.any_digesting else self._peers.warming_since,
            serving=self._serving(now),
        )
        if soon is not None:
            return soon
        listen_at = now + LISTEN_EVERY_S if len(self.leases) else None
        due = (listen_at, self.leases.next_expiry, self.receives.next_deadline, self._peers.next_greeting)
        return max(0.0, min((at - now for at in due if at is not None), default=POLL_IDLE_S))
