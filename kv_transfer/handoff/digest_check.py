"""Digests on both sides of hand-offs, for engines that verify what they read.

    holder   offer is complete ──> digest on all ranks ──> the lease keeps them ──AskDigests──> Digests
    reader   all is read ──> AskDigests ──> Digests ──> compare on all ranks ──> matched, or corrupt
                                 ^                                                  │
                                 └───────────────── of the next blocks ─────────────┘

The holder's are made when the offer is complete, so what changes in its memory after that is found, too. Both sides go
some blocks at a time: no message outgrows a channel, and a thread that digests a long prompt looks at others meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from baton.engine.core.connector import TransferId

from ..group.crew import Crew
from ..group.crew_messages import CheckHandle
from ..protocol.messages import DIGEST_BLOCKS, Digests
from ..protocol.receive import Receive
from ..transports import PeerHandle


class Digested(NamedTuple):
    offer: TransferId
    by_rank: tuple[bytes, ...]


class Compared(NamedTuple):
    receive: TransferId
    objection: str  # nothing: what was read is what the holder has


@dataclasses.dataclass(slots=True)
class _Offer:
    blocks: list[int]
    num_begun: int = 0  # leading ones that are digested, or about to be
    digests: list[bytearray] = dataclasses.field(default_factory=list)  # of those that are, by rank


class Proofs:
    """What is being digested and compared. Ranks may take their time; `poll` tells what they found."""

    def __init__(self, crew: Crew, *, verifies: bool, digest_blocks: int = DIGEST_BLOCKS) -> None:
        """`verifies`: otherwise nothing is digested or compared. `digest_blocks`: so many are digested at a time."""
        self._crew = crew
        self._verifies = verifies
        self._digest_blocks = digest_blocks
        self._offers: dict[TransferId, _Offer] = {}  # until they are digested, or have ended
        self._digesting: dict[CheckHandle, TransferId] = {}
        self._comparing: dict[CheckHandle, TransferId] = {}
        self._expected: dict[TransferId, PeerHandle] = {}  # receives that are to be proven

    def uses(self, peer: PeerHandle) -> bool:
        return peer in self._expected.values()

    @property
    def any_digesting(self) -> bool:
        """`poll` has something to go on with, now or when other ranks have reported."""
        return bool(self._digesting)

    def offered(self, offer: TransferId, blocks: Sequence[int]) -> None:
        if self._verifies:
            self._offers[offer] = _Offer(list(blocks))

    def written(self, offer: TransferId) -> None:
        """All of the offer's blocks are: they are digested, once."""
        known = self._offers.get(offer)
        if known is not None and not known.num_begun:
            self._digest_more(offer, known)

    def offer_ended(self, offer: TransferId) -> None:
        self._offers.pop(offer, None)

    def expect(self, receive: TransferId, peer: PeerHandle) -> None:
        """What is read from that memory will be compared; until `forget` it must stay known."""
        if self._verifies:
            self._expected[receive] = peer

    def compare(self, receive: Receive, digests: Digests) -> None:
        """The holder's digests of some of the blocks that were read."""
        start = digests.first - receive.first_block
        blocks = receive.block_ids[start : start + digests.count]
        check = self._crew.compare(self._expected[receive.id], blocks, digests.by_rank)
        self._comparing[check] = receive.id

    def forget(self, receive: TransferId) -> None:
        self._expected.pop(receive, None)

    def poll(self) -> list[Digested | Compared]:
        found: list[Digested | Compared] = []
        for check, offer in list(self._digesting.items()):
            reports = self._crew.checked(check)
            if reports is not None:
                del self._digesting[check]
                found += self._digested(offer, [report.digests for report in reports])
        for check, receive in list(self._comparing.items()):
            reports = self._crew.checked(check)
            if reports is not None:
                del self._comparing[check]
                if receive in self._expected:
                    found.append(Compared(receive, "; ".join(each.objection for each in reports if each.objection)))
        return found

    def _digest_more(self, offer: TransferId, known: _Offer) -> None:
        some = known.blocks[known.num_begun : known.num_begun + self._digest_blocks]
        known.num_begun += len(some)
        self._digesting[self._crew.digest(some)] = offer

    def _digested(self, offer: TransferId, by_rank: Sequence[bytes]) -> list[Digested]:
        """Some of the offer's blocks, on all ranks."""
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
