"""Make and compare digests on both sides of hand-offs, for engines that verify what they read.

    holder   offer is complete ──> digest on all ranks ──> the lease keeps them ──AskDigests──> Digests
    reader   all is read ──> AskDigests ──> Digests ──> compare on all ranks ──> match, or corrupt
                                 ^                                                  │
                                 └───────────────── of the next blocks ─────────────┘

The holder digests its blocks when the offer is complete, so a later change in its memory is found as well. Both sides
take some blocks at a time: no message outgrows a channel, and a thread that digests a long prompt serves others
meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from baton.engine.core.connector import TransferId

from ..group.read_messages import CheckHandle
from ..group.tp_read_group import TpReadGroup
from ..protocol.messages import DIGEST_BLOCKS, Digests
from ..protocol.receive import Receive
from ..transports import PeerHandle


class Digested(NamedTuple):
    offer: TransferId
    by_rank: tuple[bytes, ...]


class Compared(NamedTuple):
    receive: TransferId
    difference: str  # from what the holder has; empty if there is none


@dataclasses.dataclass(slots=True)
class _Offer:
    blocks: list[int]
    num_begun: int = 0  # leading blocks whose digests are made or ordered
    digests: list[bytearray] = dataclasses.field(default_factory=list)  # made so far, by rank


class DigestCheck:
    """Digests and comparisons that are under way on the ranks of a group; `poll` returns their results."""

    def __init__(self, group: TpReadGroup, *, verifies: bool, digest_blocks: int = DIGEST_BLOCKS) -> None:
        """Without `verifies` nothing is digested or compared. `digest_blocks` are digested at a time."""
        self._group = group
        self._verifies = verifies
        self._digest_blocks = digest_blocks
        self._offers: dict[TransferId, _Offer] = {}  # until their digests are made, or they have ended
        self._digesting: dict[CheckHandle, TransferId] = {}
        self._comparing: dict[CheckHandle, TransferId] = {}
        self._expected: dict[TransferId, PeerHandle] = {}  # memory that is read, by receives that are to be verified

    def uses(self, peer: PeerHandle) -> bool:
        """Return whether a receive that is to be verified reads from this memory."""
        return peer in self._expected.values()

    @property
    def any_digesting(self) -> bool:
        """True while blocks are being digested: `poll` continues, now or when other ranks have reported."""
        return bool(self._digesting)

    def offered(self, offer: TransferId, blocks: Sequence[int]) -> None:
        if self._verifies:
            self._offers[offer] = _Offer(list(blocks))

    def replaced(self, offer: TransferId, last_blocks: Sequence[int]) -> None:
        """Put `last_blocks` in the place of as many at the end of an offer."""
        known = self._offers.get(offer)
        if known is not None:
            known.blocks[-len(last_blocks) :] = last_blocks

    def written(self, offer: TransferId) -> None:
        """Begin to digest an offer whose blocks are all written. Later calls do nothing."""
        known = self._offers.get(offer)
        if known is not None and not known.num_begun:
            self._digest_more(offer, known)

    def offer_ended(self, offer: TransferId) -> None:
        self._offers.pop(offer, None)

    def expect(self, receive: TransferId, peer: PeerHandle) -> None:
        """Keep the memory from which a receive reads until `forget`: its blocks will be compared."""
        if self._verifies:
            self._expected[receive] = peer

    def compare(self, receive: Receive, digests: Digests) -> None:
        """Begin to compare the holder's digests of some blocks with what was read."""
        start = digests.first - receive.first_block
        blocks = receive.block_ids[start : start + digests.count]
        check = self._group.compare(self._expected[receive.id], blocks, digests.by_rank)
        self._comparing[check] = receive.id

    def forget(self, receive: TransferId) -> None:
        self._expected.pop(receive, None)

    def poll(self) -> list[Digested | Compared]:
        """Return the results that have come, and begin the next digests."""
        found: list[Digested | Compared] = []
        for check, offer in list(self._digesting.items()):
            reports = self._group.checked(check)
            if reports is not None:
                del self._digesting[check]
                found += self._digested(offer, [report.digests for report in reports])
        for check, receive in list(self._comparing.items()):
            reports = self._group.checked(check)
            if reports is not None:
                del self._comparing[check]
                if receive in self._expected:
                    found.append(Compared(receive, "; ".join(each.difference for each in reports if each.difference)))
        return found

    def _digest_more(self, offer: TransferId, known: _Offer) -> None:
        some = known.blocks[known.num_begun : known.num_begun + self._digest_blocks]
        known.num_begun += len(some)
        self._digesting[self._group.digest(some)] = offer

    def _digested(self, offer: TransferId, by_rank: Sequence[bytes]) -> list[Digested]:
        """Add the digests of some of an offer's blocks; returns all of them when they are complete."""
        known = self._offers.get(offer)
        if known is None:
            return []
        known.digests = known.digests or [bytearray() for _ in by_rank]
        for so_far, more in zip(known.digests, by_rank, strict=True):
            so_far += more
        if known.num_begun < len(known.blocks):
            self._digest_more(offer, known)
            return []
        del self._offers[offer]
        return [Digested(offer, tuple(map(bytes, known.digests)))]
