"""Carry out the actions of the state machines: messages, reads, digest checks, events for the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from baton.engine.core.connector import (
    BlocksReleased,
    ConnectorEvent,
    OfferEnded,
    Received,
    ReceiveFailed,
    TransferId,
)

from ..protocol.messages import Action, CompareDigests, Emit, ReadBlocks, SendToHolder, SendToReader, StopReading
from ..protocol.receive import Receive
from ..protocol.receives import ReceiveTable
from .digest_check import DigestCheck
from .message_router import MessageRouter
from .peers import Peers
from .reads import BlockReads


class Effects:
    """Performs actions in order. One thread calls it, and `emit` gets the events for the engine."""

    def __init__(
        self,
        router: MessageRouter,
        peers: Peers,
        reads: BlockReads,
        digest_check: DigestCheck,
        receives: ReceiveTable,
        clock: Callable[[], float],
        emit: Callable[[ConnectorEvent], None],
    ) -> None:
        self._router = router
        self._peers = peers
        self._reads = reads
        self._digest_check = digest_check
        self._receives = receives
        self._clock = clock
        self._emit = emit
        self._asked_at: dict[TransferId, float] = {}
        self.read_started_at = 0.0  # when the newest read began
        self.receive_seconds = 0.0  # summed over successful receives

    def receive_begun(self, receive: TransferId) -> None:
        """Start the clock of a receive, for `receive_seconds`."""
        self._asked_at[receive] = self._clock()

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Emit():
                    self.emit(action.event)
                case SendToReader():
                    self._router.to_reader(action.to, action.message)
                case SendToHolder():
                    peer = self._peers.get(action.to)
                    self._router.send(peer.route if peer else None, action.message)
                case ReadBlocks():
                    self._read(action)
                case StopReading():
                    self._reads.stop(action.receive)
                case CompareDigests():
                    self._digest_check.compare(self._receives[action.receive], action.digests)

    def emit(self, event: ConnectorEvent) -> None:
        """Pass an event to the engine, and forget the state of a transfer that has ended."""
        match event:
            case Received():
                self._digest_check.forget(event.transfer_id)
                self.receive_seconds += self._clock() - self._asked_at.pop(event.transfer_id)
            case ReceiveFailed():
                self._digest_check.forget(event.transfer_id)
            case BlocksReleased():
                self._asked_at.pop(event.transfer_id, None)
            case OfferEnded():
                self._digest_check.offer_ended(event.transfer_id)
        self._emit(event)

    def _read(self, action: ReadBlocks) -> None:
        known, wanted = self._receives[action.receive], slice(action.start, action.stop)
        if action.receive not in self._reads:
            self._begin_read(known)
        blocks = np.array(known.block_ids[wanted], dtype=np.int64)
        self._reads.extend(known.id, known.source_blocks[wanted], blocks)
        self.read_started_at = self._clock()

    def _begin_read(self, receive: Receive) -> None:
        peer = self._peers.get(receive.ticket.lease.holder)
        assert peer is not None, "a read starts when its peer is ready"
        assert peer.memory is not None, "a read starts when its peer is ready"
        self._reads.start(receive.id, peer.memory, len(receive.block_ids))
        self._digest_check.expect(receive.id, peer.memory)
