"""Carries out what the state machines ask for: messages, reads, digests, news for the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.engine.core.connector import (
    BlocksReleased,
    ConnectorEvent,
    OfferEnded,
    Received,
    ReceiveFailed,
    TransferId,
)

from ..protocol.actions import Action, Emit, Read, SendToHolder, SendToReader, StopRead, Verify
from ..protocol.receive import Receive
from ..protocol.receives import ReceiveTable
from .digest_check import Proofs
from .message_router import Mail
from .peers import Peers
from .reads import Pulls


class Deeds:
    """One thread calls it; `emit` gets events in their order."""

    def __init__(
        self,
        mail: Mail,
        peers: Peers,
        pulls: Pulls,
        proofs: Proofs,
        receives: ReceiveTable,
        clock: Callable[[], float],
        emit: Callable[[ConnectorEvent], None],
    ) -> None:
        self._mail = mail
        self._peers = peers
        self._pulls = pulls
        self._proofs = proofs
        self._receives = receives
        self._clock = clock
        self._emit = emit
        self._asked_at: dict[TransferId, float] = {}
        self.read_started_at = 0.0  # the youngest one
        self.receive_seconds = 0.0  # of all that were received

    def asked(self, receive: TransferId) -> None:
        """The engine wants it, from now on."""
        self._asked_at[receive] = self._clock()

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Emit():
                    self.tell(action.event)
                case SendToReader():
                    self._mail.to_reader(action.to, action.message)
                case SendToHolder():
                    peer = self._peers.get(action.to)
                    self._mail.send(peer.route if peer else None, action.message)
                case Read():
                    self._read(action)
                case StopRead():
                    self._pulls.stop(action.receive)
                case Verify():
                    self._proofs.compare(self._receives[action.receive], action.digests)

    def tell(self, event: ConnectorEvent) -> None:
        """The engine; what was kept for a transfer goes with its end."""
        match event:
            case Received():
                self._proofs.forget(event.transfer_id)
                self.receive_seconds += self._clock() - self._asked_at.pop(event.transfer_id)
            case ReceiveFailed():
                self._proofs.forget(event.transfer_id)
            case BlocksReleased():
                self._asked_at.pop(event.transfer_id, None)
            case OfferEnded():
                self._proofs.offer_ended(event.transfer_id)
        self._emit(event)

    def _read(self, action: Read) -> None:
        known, wanted = self._receives[action.receive], slice(action.start, action.stop)
        if action.receive not in self._pulls:
            self._begin_pull(known)
        self._pulls.extend(known.id, known.source_blocks[wanted], known.block_ids[wanted])
        self.read_started_at = self._clock()

    def _begin_pull(self, receive: Receive) -> None:
        peer = self._peers.get(receive.ticket.lease.holder)
        assert peer is not None, "a read starts when its peer is ready"
        assert peer.memory is not None, "a read starts when its peer is ready"
        self._pulls.start(receive.id, peer.memory, len(receive.block_ids))
        self._proofs.expect(receive.id, peer.memory)
