"""Handshakes: the terms that two engines must share before one reads the other's blocks, and the holder's answers.

A handshake gives a reader the address of the holder's memory. It also makes the holder serve the reader for a while:
over some lanes, such as TCP, a read advances only while the holder calls its transport's `progress`. A reader sends a
handshake when it is about to read, or still reads without a grant, which the holder cannot know otherwise (`peers.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..channel import Route
from ..errors import MalformedMessage
from ..group.tp_read_group import TpReadGroup
from ..protocol.messages import DigestMode, EngineKey, HandshakeAccepted, HandshakeRefused, HandshakeRequest
from ..protocol.ticket import Ticket
from .message_router import MessageRouter

SERVE_AFTER_HANDSHAKE_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class PairingTerms:
    """One engine's terms. Handshakes and tickets carry its key, fingerprint, transport and digest mode."""

    key: EngineKey
    fingerprint: str
    transport: str
    digest: DigestMode
    block_size: int  # tokens
    num_groups: int  # cache groups
    num_blocks: int  # of all cache groups

    @classmethod
    def of(cls, key: EngineKey, group: TpReadGroup, digest: DigestMode) -> PairingTerms:
        region = group.region
        num_groups = len(region.arenas)
        return cls(
            key, region.fingerprint, group.transport_name, digest, region.block_size, num_groups, region.num_blocks
        )

    def request(self, to: EngineKey) -> HandshakeRequest:
        return HandshakeRequest(self.key, to, self.fingerprint, self.transport, self.digest)

    def objection(self, request: HandshakeRequest) -> str:
        """Return why the sender cannot read our blocks, or an empty string if it can."""
        if request.to != self.key:
            return f"engine {request.to.engine_id} (epoch {request.to.epoch}) is gone; here is {self.key.engine_id}"
        if request.fingerprint != self.fingerprint:
            return f"its KV layout is {self.fingerprint}, the reader's is {request.fingerprint}"
        if request.transport != self.transport:
            return f"its transport is {self.transport}, the reader's is {request.transport}"
        if request.digest is not self.digest:
            return f"its transfer.digest is {self.digest.value!r}, the reader's is {request.digest.value!r}"
        return ""

    def check(self, ticket: Ticket, first_block: int, block_ids: Sequence[int]) -> None:
        """Raise `MalformedMessage` for a ticket that this engine cannot use for these blocks."""
        if ticket.fingerprint != self.fingerprint:
            raise MalformedMessage(f"the ticket's KV layout is {ticket.fingerprint}, this engine's {self.fingerprint}")
        if ticket.transport != self.transport:
            raise MalformedMessage(f"the ticket is for transport {ticket.transport}, here is {self.transport}")
        if ticket.digest is not self.digest:
            raise MalformedMessage(
                f"the ticket's holder has transfer.digest {ticket.digest.value!r}, here it is {self.digest.value!r}"
            )
        if self.num_groups == 1:  # with several groups, `RankReader` checks the group of each block instead
            ticket.check_block_size(self.block_size)
        wanted = ticket.num_blocks - first_block
        if first_block < 0 or wanted != len(block_ids):
            raise MalformedMessage(
                f"the ticket offers {ticket.num_blocks} blocks; from block {first_block} on that is {wanted},"
                f" but {len(block_ids)} are to be filled"
            )
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise MalformedMessage(f"a block to be filled is outside this engine's {self.num_blocks}")


class HandshakeResponder:
    """Answers readers' handshakes. Times are seconds on the caller's clock."""

    def __init__(self, terms: PairingTerms, group: TpReadGroup, router: MessageRouter) -> None:
        self._terms = terms
        self._group = group
        self._router = router
        self._serve_until = 0.0
        self._round_at = 0.0
        self._answered: set[Route] = set()  # in this round

    def answer(self, route: Route, request: HandshakeRequest, now: float) -> None:
        """Answer a request, but only one a round for each connection: after an outage many arrive at once."""
        if now != self._round_at:
            self._round_at, self._answered = now, set()
        if route in self._answered:
            return
        self._answered.add(route)
        reason = self._terms.objection(request)
        if reason:
            self._router.send(route, HandshakeRefused(request.to, request.sender, reason))
            return
        self._serve_until = max(self._serve_until, now + SERVE_AFTER_HANDSHAKE_S)
        self._router.send(route, HandshakeAccepted(self._terms.key, request.sender, self._group.metadata))

    def is_serving(self, now: float) -> bool:
        """Return whether a recent handshake obliges us to serve a reader."""
        return now < self._serve_until
