"""One receive of a reader: its data, and the conditions that follow from it. Its rules are in `receive_rules`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from baton.engine.core.connector import TransferId

from .block_runs import BlockNumbers
from .messages import Claim, Digests, ReaderKey, Renew
from .receive_rules import ReceiveState
from .ticket import Ticket


@dataclasses.dataclass(slots=True, eq=False)
class Receive:
    key: ReaderKey
    ticket: Ticket
    first_block: int  # index in the ticket's blocks; earlier ones are in our prefix cache
    block_ids: list[int]  # the blocks to fill, as many as are to be read
    deadline: float  # when it fails, unless a connection or a grant extends it
    num_ready: int  # leading blocks of the ticket that may be read
    num_unverified: int  # trailing blocks that are not verified yet; 0 unless digests are on
    state: ReceiveState = ReceiveState.RESERVED
    sent_at: dict[int, float] = dataclasses.field(default_factory=dict)  # unanswered claims and renewals by number
    last_number: int = 0
    ask_at: float = 0.0  # time of the next claim or renewal
    granted_until: float | None = None
    num_ordered: int | None = None  # leading `block_ids` whose read was ordered; None: no read has begun
    first_claim_at: float | None = None
    read_finished_at: float | None = None
    digests: Digests | None = None  # the holder's, while they are being compared
    source: BlockNumbers | None = None  # see `source_blocks`
    writable: bool = False  # a read may write into the blocks
    offer_ended: bool = False  # the holder has said that its offer is over

    @property
    def id(self) -> TransferId:
        return self.key.receive

    @property
    def grows(self) -> bool:
        return self.num_ready < self.ticket.num_blocks

    @property
    def source_blocks(self) -> BlockNumbers:
        """The blocks to read, as the holder numbers them. They are listed when a read begins, behind the claim."""
        if self.source is None:
            self.source = self.ticket.block_ids[self.first_block :]
        return self.source

    def grow(self, num_ready: int, last_blocks: Sequence[int] = ()) -> None:
        """Allow reads of the ticket's leading `num_ready` blocks. A smaller number than before changes nothing.

        `last_blocks` replace as many blocks at the end of the ticket's list, which nothing has read yet.
        """
        is_last = self.grows and num_ready >= self.ticket.num_blocks
        count = min(len(last_blocks), len(self.block_ids))
        if is_last and count:
            last = np.array(last_blocks[-count:], dtype=np.int64)
            self.source = np.concatenate((self.source_blocks[:-count], last))  # running reads keep the old array
        self.num_ready = max(self.num_ready, min(num_ready, self.ticket.num_blocks))

    @property
    def due(self) -> float:
        """The time of the next action if no event comes."""
        return min(self.deadline, self.ask_at) if self.state is ReceiveState.READING else self.deadline

    def claim(self, now: float, retry_s: float) -> Claim | Renew:
        """Return the claim or renewal to send now. Unless it is answered, the next is due after `retry_s`."""
        self.last_number += 1
        self.sent_at[self.last_number] = now
        self.ask_at = now + retry_s
        if self.first_claim_at is None:
            self.first_claim_at = now
        kind = Claim if self.granted_until is None else Renew
        return kind(self.ticket.lease, self.key, self.last_number)

    def schedule_retry(self, now: float, retry_s: float) -> None:
        """Ask again soon if blocks or digests are still missing, since the holder's messages may be lost."""
        if self.grows or self.lacks_digests:
            self.ask_at = min(self.ask_at, now + retry_s)

    def order(self) -> range | None:
        """Return the range of `block_ids` to read next; empty: begin the read, no block is ready yet. None: no more."""
        ordered, ready = self.num_ordered, max(0, self.num_ready - self.first_block)
        if ordered is not None and ordered >= ready:
            return None
        self.num_ordered = ready
        return range(ordered or 0, ready)

    @property
    def all_is_read(self) -> bool:
        return self.read_finished_at is not None and not self.grows

    @property
    def all_is_there(self) -> bool:
        return self.all_is_read and self.granted_until is not None and not self.num_unverified

    @property
    def lacks_digests(self) -> bool:
        return self.all_is_read and self.digests is None and self.num_unverified > 0

    @property
    def first_unverified(self) -> int:
        """The index of the ticket's first unverified block. Ours are the ticket's last blocks."""
        return self.ticket.num_blocks - self.num_unverified

    def lacks(self, digests: Digests) -> bool:
        """Return whether these are the digests that this receive is waiting for."""
        return self.lacks_digests and digests.first == self.first_unverified and digests.count <= self.num_unverified

    def timeout_reason(self, connect_s: float) -> str:
        holder = f"{self.ticket.lease.holder.engine_id} at {self.ticket.kv_address}"
        if self.state is ReceiveState.RESERVED:
            return f"no connection to {holder} within {connect_s:g} s"
        if self.granted_until is None:
            return f"{holder} answered no claim within {self.ticket.lease_s:g} s"
        if self.read_finished_at is not None:
            return f"the lease at {holder} ended before it sent its digests"
        return f"the lease at {holder} ended before the read did"
