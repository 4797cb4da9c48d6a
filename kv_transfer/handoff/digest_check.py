"""Compute and compare digests on both sides of hand-offs, for engines that verify what they read.

    holder   offer is complete ──> digest on all ranks ──> the lease keeps them ──AskDigests──> Digests
    reader   all blocks are read ──> AskDigests ──> Digests ──> compare on all ranks ──> match, or corrupt
                                         ^                                                  │
                                         └────────────── for the next blocks ───────────────┘

The holder digests its blocks as soon as the offer is complete, so that later changes in its memory are found, too. Both
sides take some blocks at a time, so that no message exceeds a channel's limit and a long prompt does not keep the
thread from serving others.
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
    difference: str  # the first one on each rank; empty if all digests match


@dataclasses.dataclass(slots=True)
class _Offer:
    blocks: list[int]
    num_begun: int = 0  # leading blocks whose digests are computed or ordered
    digests: list[bytearray] = dataclasses.field(default_factory=list)  # computed so far, by rank


class DigestCheck:
    """Digests and comparisons that run on the ranks of a group. `poll` returns their results."""

    def __init__(self, group: TpReadGroup, *, verifies: bool, digest_blocks: int = DIGEST_BLOCKS) -> None:
        """Without `verifies` nothing is digested or compared. `digest_blocks` blocks are digested at a time."""
        self._group = group
        self._verifies = verifies
        self._digest_blocks = digest_blocks
        self._offers: dict[TransferId, _Offer] = {}  # until their digests are complete, or they have ended
        self._digesting: dict[CheckHandle, TransferId] = {}
        self._comparing: dict[CheckHandle, TransferId] = {}
        self._expected: dict[TransferId, PeerHandle] = {}  # by receive to verify: the memory it reads from

    def uses(self, peer: PeerHandle) -> bool:
        """Return whether a receive that will be verified reads from this memory."""
        return peer in self._expected.values()

    @property
    def any_digesting(self) -> bool:
        """True while blocks are being digested, so that `poll` must be called soon."""
        return bool(self._digesting)

    def offered(self, offer: TransferId, blocks: Sequence[int]) -> None:
        if self._verifies:
            self._offers[offer] = _Offer(list(blocks))

    def replaced(self, offer: TransferId, last_blocks: Sequence[int]) -> None:
        """Replace as many blocks at the end of an offer by `last_blocks`."""
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
        """Keep the peer's memory until `forget`, since the blocks of this receive will be compared."""
        if self._verifies:
            self._expected[receive] = peer

    def compare(self, receive: Receive, digests: Digests) -> None:
        """Begin to compare the blocks that were read with the holder's digests of them."""
        start = digests.first - receive.first_block
        blocks = receive.block_ids[start : start + digests.count]
        check = self._group.compare(self._expected[receive.id], blocks, digests.by_rank)
        self._comparing[check] = receive.id

    def forget(self, receive: TransferId) -> None:
        self._expected.pop(receive, None)

    def poll(self) -> list[Digested | Compared]:
        """Return the results that have arrived, and begin the next digests."""
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
        """Add digests of some of an offer's blocks. Returns the offer's digests once they are complete."""
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
