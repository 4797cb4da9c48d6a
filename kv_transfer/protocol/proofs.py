"""Digests on both sides of hand-offs, for engines that verify what they read.

    holder   offer is complete ──> digest on all ranks ──> the lease keeps them ──AskDigests──> Digests
    reader   all is read ──> AskDigests ──> Digests ──> compare on all ranks ──> matched, or corrupt

The holder's are made when the offer is complete, so what changes in its memory after that is found, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.engine.core.connector import TransferId

from ..ranks.crew import Crew
from ..ranks.crew_messages import CheckHandle
from ..transports import PeerHandle
from .receive import Receive


class Digested(NamedTuple):
    offer: TransferId
    by_rank: tuple[bytes, ...]


class Compared(NamedTuple):
    receive: TransferId
    objection: str  # nothing: what was read is what the holder has


class Proofs:
    """What is being digested and compared. Ranks may take their time; `poll` tells what they found."""

    def __init__(self, crew: Crew, *, verifies: bool) -> None:
        """`verifies`: otherwise nothing is digested or compared."""
        self._crew = crew
        self._verifies = verifies
        self._undigested: dict[TransferId, list[int]] = {}  # blocks of offers that grow
        self._digesting: dict[CheckHandle, TransferId] = {}
        self._comparing: dict[CheckHandle, TransferId] = {}
        self._expected: dict[TransferId, PeerHandle] = {}  # receives that are to be proven

    def uses(self, peer: PeerHandle) -> bool:
        return peer in self._expected.values()

    def offered(self, offer: TransferId, blocks: Sequence[int]) -> None:
        if self._verifies:
            self._undigested[offer] = list(blocks)

    def written(self, offer: TransferId) -> None:
        """All of the offer's blocks are: they are digested, once."""
        if offer in self._undigested:
            self._digesting[self._crew.digest(self._undigested.pop(offer))] = offer

    def offer_ended(self, offer: TransferId) -> None:
        self._undigested.pop(offer, None)

    def expect(self, receive: TransferId, peer: PeerHandle) -> None:
        """What is read from that memory will be compared; until `forget` it must stay known."""
        if self._verifies:
            self._expected[receive] = peer

    def compare(self, receive: Receive, by_rank: Sequence[bytes]) -> None:
        """`by_rank`: the holder's digests of all the offer's blocks, of which ours are the last."""
        offered = receive.ticket.num_blocks
        behind_prefix = [digests[len(digests) // offered * receive.first_block :] for digests in by_rank]
        check = self._crew.compare(self._expected[receive.id], receive.block_ids, behind_prefix)
        self._comparing[check] = receive.id

    def forget(self, receive: TransferId) -> None:
        self._expected.pop(receive, None)

    def poll(self) -> list[Digested | Compared]:
        found: list[Digested | Compared] = []
        for check, offer in list(self._digesting.items()):
            reports = self._crew.checked(check)
            if reports is not None:
                del self._digesting[check]
                found.append(Digested(offer, tuple(report.digests for report in reports)))
        for check, receive in list(self._comparing.items()):
            reports = self._crew.checked(check)
            if reports is not None:
                del self._comparing[check]
                if receive in self._expected:
                    found.append(Compared(receive, "; ".join(each.objection for each in reports if each.objection)))
        return found
