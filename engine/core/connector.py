"""The engine's view of KV transfers. `kv_transfer` implements it; the scheduler calls it between steps.

Owners of the blocks:

    prefill   offer(blocks) ............................ OfferEnded     blocks stay referenced in between
    decode    receive(blocks) ............. Received                    filled: they belong to the request again
              receive(blocks) .. ReceiveFailed .. BlocksReleased        quarantined in between: a late write may land

Exactly one `OfferEnded` follows each `offer`, also one that is withdrawn or expires. After each `receive` comes either
`Received`, or `ReceiveFailed` and later `BlocksReleased` (at once, if no write can be in flight). Cancelling a receive
changes only that `Received` can no longer come.

Blocks are numbered through all arenas, and the blocks of a hand-off are in the order in which they are complete; see
`kv/block_numbers.py`.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from typing import Protocol

import msgspec

TransferId = int


class OfferOutcome(enum.StrEnum):
    FINISHED = "finished"  # the reader has all blocks
    WITHDRAWN = "withdrawn"  # by this engine, or by a reader that gave up
    EXPIRED = "expired"


class OfferEnded(msgspec.Struct, frozen=True):
    transfer_id: TransferId
    outcome: OfferOutcome


class Received(msgspec.Struct, frozen=True):
    transfer_id: TransferId
    # On the clock of `time.monotonic`, if the connector knows: when the claim was sent, and when all bytes had arrived.
    claimed_s: float | None = None
    pulled_s: float | None = None


class ReceiveFailed(msgspec.Struct, frozen=True):
    transfer_id: TransferId
    reason: str
    offer_ended: bool = False  # the offer ended before it was claimed: the only failure is that this engine was late


class BlocksReleased(msgspec.Struct, frozen=True):
    transfer_id: TransferId


ConnectorEvent = OfferEnded | Received | ReceiveFailed | BlocksReleased


class Offer(msgspec.Struct, frozen=True):
    transfer_id: TransferId
    ticket: bytes


class KVConnector(Protocol):
    """The transfers of one engine. All calls return at once, and none raises for a peer's failure: that is an event."""

    def offer(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        """Offer blocks that hold all that is read of the first `num_tokens` tokens; they stay until the offer ends."""
        ...

    def withdraw(self, transfer_id: TransferId) -> None:
        """End an offer early. Unknown and ended ids are ignored."""
        ...

    def receive(
        self, request_id: str, generation: int, ticket: bytes, first_block: int, block_ids: Sequence[int]
    ) -> TransferId:
        """Fetch the offered blocks into `block_ids`, from index `first_block` on: earlier ones are prefix hits.

        An invalid ticket is answered by `ReceiveFailed`, too.
        """
        ...

    def cancel(self, transfer_id: TransferId) -> None:
        """Give up a receive. Unknown and ended ids are ignored."""
        ...

    def poll(self) -> list[ConnectorEvent]:
        """Return the events since the last call, in order."""
        ...


class GrowingConnector(abc.ABC):
    """A `KVConnector` that can offer blocks before they are written, so that they are read while the prompt runs."""

    offers_early: bool  # False: blocks are offered only when the whole prompt has been computed

    @abc.abstractmethod
    def offer_growing(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        """Offer blocks as `offer` does, before any of them is written. `advance` then says how many are.

        No block may be used for anything else until the offer ends, even if the prompt is given up: `withdraw` it then.
        """

    @abc.abstractmethod
    def advance(self, transfer_id: TransferId, num_ready: int, last_blocks: Sequence[int] = ()) -> None:
        """Note that the first `num_ready` blocks are written, on all ranks. Unknown and ended ids are ignored.

        The last call gives `last_blocks`: they replace as many blocks at the end of the offer. These are slots of
        states, which may change while the prompt is computed.
        """
