"""What two engines must agree on before one reads the other's blocks: it stands in every greeting and every ticket."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..errors import MalformedMessage
from ..group.crew import Crew
from ..net.channel import Route
from ..protocol.messages import DigestMode, EngineKey, Hello, Ticket, Unwelcome, Welcome
from .message_router import Mail

SERVE_AFTER_HELLO_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Pairing:
    """One engine's side of it."""

    key: EngineKey
    fingerprint: str
    transport: str
    digest: DigestMode
    block_size: int  # tokens
    num_blocks: int

    @classmethod
    def of(cls, key: EngineKey, crew: Crew, digest: DigestMode) -> Pairing:
        layout = crew.layout
        return cls(key, layout.fingerprint, crew.transport_name, digest, layout.block_size, crew.num_blocks)

    def hello(self, to: EngineKey) -> Hello:
        return Hello(self.key, to, self.fingerprint, self.transport, self.digest)

    def objection(self, hello: Hello) -> str:
        """Why who greets cannot read our blocks; nothing where it can."""
        if hello.to != self.key:
            return f"engine {hello.to.engine_id} (epoch {hello.to.epoch}) is gone; here is {self.key.engine_id}"
        if hello.fingerprint != self.fingerprint:
            return f"its KV layout is {self.fingerprint}, the reader's is {hello.fingerprint}"
        if hello.transport != self.transport:
            return f"its transport is {self.transport}, the reader's is {hello.transport}"
        if hello.digest is not self.digest:
            return f"its transfer.digest is {self.digest.value!r}, the reader's is {hello.digest.value!r}"
        return ""

    def check(self, ticket: Ticket, first_block: int, block_ids: Sequence[int]) -> Ticket:
        """Raises `MalformedMessage` for a ticket that this engine cannot use for these blocks."""
        if ticket.fingerprint != self.fingerprint:
            raise MalformedMessage(f"the ticket's KV layout is {ticket.fingerprint}, this engine's {self.fingerprint}")
        if ticket.transport != self.transport:
            raise MalformedMessage(f"the ticket is for transport {ticket.transport}, here is {self.transport}")
        if ticket.digest is not self.digest:
            raise MalformedMessage(
                f"the ticket's holder has transfer.digest {ticket.digest.value!r}, here it is {self.digest.value!r}"
            )
        ticket.check_block_size(self.block_size)
        wanted = ticket.num_blocks - first_block
        if first_block < 0 or wanted != len(block_ids):
            raise MalformedMessage(
                f"the ticket offers {ticket.num_blocks} blocks; from block {first_block} on that is {wanted},"
                f" but {len(block_ids)} are to be filled"
            )
        if any(not 0 <= block < self.num_blocks for block in block_ids):
            raise MalformedMessage(f"a block to be filled is outside this engine's {self.num_blocks}")
        return ticket


class Greetings:
    """Times are seconds on the caller's clock."""

    def __init__(self, me: Pairing, crew: Crew, mail: Mail) -> None:
        self._me = me
        self._crew = crew
        self._mail = mail
        self._serve_until = 0.0
        self._round_at = 0.0
        self._answered: set[Route] = set()  # in this round

    def answer(self, route: Route, hello: Hello, now: float) -> None:
        """Once a round: those of hours come at once over a connection that could not be made before."""
        if now != self._round_at:
            self._round_at, self._answered = now, set()
        if route in self._answered:
            return
        self._answered.add(route)
        reason = self._me.objection(hello)
        if reason:
            self._mail.send(route, Unwelcome(hello.to, hello.sender, reason))
            return
        self._serve_until = max(self._serve_until, now + SERVE_AFTER_HELLO_S)
        self._mail.send(route, Welcome(self._me.key, hello.sender, self._crew.metadata))

    def any_lately(self, now: float) -> bool:
        """Someone is to be served for it."""
        return now < self._serve_until
