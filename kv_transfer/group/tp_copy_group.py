"""Rank 0's view of a group whose ranks copy their shares of blocks together: to staging slots, or to tiers.

    rank 0's thread:  order ──> every other rank's MemberThread: OrderHandler.handle
                      copies its own share
                      answers <── one report of each

While rank 0 waits for an answer it keeps asking ZeroMQ whether the connection still stands, so a rank that dies is
noticed at once. A rank that takes long is waited for: its blocks must not be used while it still reads or writes them.
"""

from __future__ import annotations

import collections
from typing import Any, TypeVar

import msgspec

from ..errors import RankLost
from .rpc import JOIN_TIMEOUT_S, GroupLeader, GroupSocket, Service

PING_EVERY_S = 0.5

Report = TypeVar("Report", bound=msgspec.Struct)


class TpCopyGroup:
    """The other ranks of a group, once all have joined. One thread makes it, uses it and closes it.

    Raises `TransportError` for ranks that do not come in time or do not fit; calls raise `RankLost` once one is gone.
    """

    def __init__(
        self, socket: GroupSocket, fingerprint: str, service: Service, timeout_s: float = JOIN_TIMEOUT_S
    ) -> None:
        self._socket = socket
        self._leader = GroupLeader(socket.channel, socket.size, fingerprint, service)
        self._leader.gather(socket.channel.wait, timeout_s)
        self.ranks = self._leader.ranks
        self._reports: dict[int, collections.deque[Any]] = {rank: collections.deque() for rank in self.ranks}

    def order(self, order: msgspec.Struct) -> None:
        """Send an order to all ranks; they begin at once."""
        self._leader.broadcast(order)

    def answers(self, kind: type[Report]) -> list[Report]:
        """Return the next report of each rank, by rank, however long that takes."""
        found: list[Report] = []
        for rank in self.ranks:
            report = self.next_report(rank)
            if not isinstance(report, kind):
                raise RankLost(f"rank {rank} sends {type(report).__name__} instead of {kind.__name__}")
            found.append(report)
        return found

    def next_report(self, rank: int) -> Any:
        """Return one rank's next report, however long that takes."""
        reports = self._reports[rank]
        while not reports:
            self._socket.channel.wait(PING_EVERY_S)
            for sender, report in self._leader.receive():
                self._reports[sender].append(report)
            if not reports:
                self._leader.ping(rank)
        return reports.popleft()

    def close(self) -> None:
        self._socket.close()
