"""All ranks of one group do the same to their shares of blocks, and rank 0 hears when all have done it.

    rank 0's thread:  order ──> every other rank's TeamMember: Servant.obey
                      does its own share
                      answers <── one report of each

Who waits for an answer asks meanwhile whether the connection still stands, so a rank that dies is noticed at once. One
that takes long is waited for: nobody may use what it still reads or writes.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from baton.engine.net.curve import ClusterKey

from ..affinity import pin_thread
from ..codec import MAX_REASON_CHARS
from ..errors import MalformedMessage, RankLost, TransportError
from ..net.channel import RankSocket, Route, join_ranks
from ..threads import ChannelThread
from .team_messages import (
    AreYouThere,
    GiveUp,
    TeamJoin,
    TeamOrder,
    TeamReport,
    decode_order,
    decode_report,
    encode,
)

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 50.0
PROBE_EVERY_S = 0.5
IDLE_S = 60.0

Report = TypeVar("Report", bound=TeamReport)


@dataclasses.dataclass
class _Mate:
    """Another rank, as rank 0 knows it."""

    rank: int
    route: Route
    reports: collections.deque[TeamReport] = dataclasses.field(default_factory=collections.deque)


class Team:
    """Rank 0's hold on the others, once all have joined. One thread makes it, uses it and closes it.

    Raises `TransportError` for ranks that do not come in time or do not fit; calls raise `RankLost` once one is gone.
    """

    def __init__(self, socket: RankSocket, fingerprint: str, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """`fingerprint`: of the layout, which all must have."""
        self._socket = socket
        self._channel = socket.channel
        self._fingerprint = fingerprint
        self._mates: dict[Route, _Mate] = {}
        self._gather(timeout_s)

    def order(self, order: TeamOrder) -> None:
        """To all of them; they begin at once."""
        data = encode(order)
        for mate in self._in_order():
            if not self._channel.send(mate.route, data):
                raise RankLost(f"the connection to rank {mate.rank} is broken")

    def answers(self, kind: type[Report]) -> list[Report]:
        """The next report of each rank, in their order, however long that takes."""
        found: list[Report] = []
        for mate in self._in_order():
            report = self._next_report(mate)
            if not isinstance(report, kind):
                raise RankLost(f"rank {mate.rank} sends {type(report).__name__} instead of {kind.__name__}")
            found.append(report)
        return found

    def next_report(self, rank: int) -> TeamReport:
        """For reports that come in several pieces."""
        return self._next_report(next(mate for mate in self._mates.values() if mate.rank == rank))

    @property
    def ranks(self) -> list[int]:
        return [mate.rank for mate in self._in_order()]

    def close(self) -> None:
        self._socket.close()

    def _in_order(self) -> list[_Mate]:
        return sorted(self._mates.values(), key=lambda mate: mate.rank)

    def _gather(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while missing := sorted(set(range(1, self._socket.size)) - {mate.rank for mate in self._mates.values()}):
            if time.monotonic() >= deadline:
                raise TransportError(
                    f"of {self._socket.size} ranks these did not join for copies within {timeout_s:g} s: {missing}"
                )
            self._channel.wait(PROBE_EVERY_S)
            self._take_in()

    def _next_report(self, mate: _Mate) -> TeamReport:
        while not mate.reports:
            self._channel.wait(PROBE_EVERY_S)
            self._take_in()
            if not mate.reports and not self._channel.send(mate.route, encode(AreYouThere())):
                raise RankLost(f"rank {mate.rank} has gone")
        return mate.reports.popleft()

    def _take_in(self) -> None:
        for route, data in self._channel.receive():
            mate = self._mates.get(route)
            try:
                report = decode_report(data)
            except MalformedMessage as error:
                if mate is not None:
                    raise RankLost(f"rank {mate.rank} sends nonsense: {error}") from error
                logger.warning("dropped: %s", error)
                continue
            match mate, report:
                case None, TeamJoin():
                    self._mates[route] = self._checked(report, route)
                case None, _:
                    logger.warning("dropped: a %s of someone who is not of this group", type(report).__name__)
                case _Mate(), GiveUp():
                    raise RankLost(f"rank {mate.rank} cannot go on: {report.reason}")
                case _Mate(), _:
                    mate.reports.append(report)

    def _checked(self, join: TeamJoin, route: Route) -> _Mate:
        if join.rank >= self._socket.size or join.rank in {mate.rank for mate in self._mates.values()}:
            raise TransportError(f"rank {join.rank} joined a group of {self._socket.size} that has no place for it")
        if join.fingerprint != self._fingerprint:
            raise TransportError(
                f"rank {join.rank} keeps blocks of layout {join.fingerprint}, rank 0 of {self._fingerprint}"
            )
        return _Mate(join.rank, route)


class Servant(Protocol):
    """What another rank does when it is told to. One thread uses it."""

    def obey(self, order: TeamOrder) -> Iterator[TeamReport]: ...

    def close(self) -> None: ...


class TeamMember:
    """One rank's part in its group's copies, in a thread of its own. Ranks 1, 2, ... have one for each `Team`.

    `leader` is the address of rank 0's socket. What this one cannot survive, rank 0 is told, also what `begin` raises,
    which is called in the thread.
    """

    def __init__(
        self,
        begin: Callable[[], Servant],
        *,
        rank: int,
        fingerprint: str,
        leader: str,
        key: ClusterKey | None,
        device: str,
        cpu_affinity: str,
        name: str,
    ) -> None:
        """Raises `TransportError` for an address that is none. `name`: of the thread."""
        self._begin, self._device, self._cpu_affinity = begin, device, cpu_affinity
        self._channel, self._leader = join_ranks(leader, key)
        self._tell(TeamJoin(rank, fingerprint))
        self._thread = ChannelThread(name, self._channel, self._run)
        self._thread.start()  # and is not waited for: rank 0 hears whether it could begin

    def close(self) -> None:
        """After what is under way. Closing twice changes nothing."""
        self._thread.close()

    def _run(self, ready: Callable[[], None]) -> None:
        servant = None
        try:
            pin_thread(self._cpu_affinity, self._device)
            servant = self._begin()
            ready()
            while not self._thread.is_closing:
                for _, data in self._channel.receive():
                    for report in servant.obey(decode_order(data)):
                        self._tell(report)
                self._channel.wait(IDLE_S)
        except Exception as error:
            logger.exception("%s died", self._thread.name)
            self._tell(GiveUp(f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]))
        if servant is not None:
            servant.close()

    def _tell(self, report: TeamReport) -> None:
        self._channel.send(self._leader, encode(report))  # a broken connection is for rank 0 to notice
