"""Orders and reports between the ranks of one tensor-parallel group.

    rank 0 (GroupLeader)                 another rank (GroupMember)
      <------------------------------ Join      its rank, its layout, and details that the service asks for
      orders of the service ---------->
      <------------------------------ reports of the service
      Ping --------------------------->         never answered: sending it fails if the connection is broken
      <------------------------------ GiveUp    the rank cannot go on, and why

Copies of all ranks' shares of blocks, to staging slots or tiers (`TpCopyGroup` is rank 0's side):

    rank 0's thread:  order ──> every other rank's MemberThread: OrderHandler.handle
                      copies its own share
                      answers <── one report from each

A *service* is one use of a group: reads, copies to staging slots, tiers. Each has its own socket and messages. A
connection keeps the order of messages and loses none while it lasts, and a broken one ends the group. The bytes come
from other processes: decoding returns a valid message or raises `MalformedMessage`.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple, Protocol, Self, TypeVar

import msgspec
from msgspec import Meta

from baton.engine.net.curve import ClusterKey

from .. import codec
from ..channel import Channel, Route, ZmqChannel
from ..codec import MAX_REASON_CHARS, Name, Reason
from ..errors import MalformedMessage, RankLost, TransportError
from ..threads import ChannelThread

logger = logging.getLogger(__name__)

MAX_RANKS = 1024
JOIN_TIMEOUT_S = 50.0
GROUP_HEARTBEAT_TIMEOUT_S = 10.0  # longer than between engines, since a broken connection ends the whole group
IDLE_S = 60.0

Rank = Annotated[int, Meta(ge=1, lt=MAX_RANKS)]
PING_EVERY_S = 0.5

Report = TypeVar("Report", bound=msgspec.Struct)


class Join(msgspec.Struct, frozen=True, array_like=True, tag=0):
    rank: Rank
    fingerprint: Name  # of the layout
    details: msgspec.Raw = msgspec.Raw(codec.encode(None))  # see `Service`


class GiveUp(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The rank has failed. It sends this instead of `Join` if it could not start."""

    rank: Rank
    reason: Reason


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Tests the connection. There is no answer: sending it fails if the connection is broken."""


class Service(NamedTuple):
    """The decoders of one service. Tags of its messages begin at 10."""

    decode_order: Callable[[bytes], Any]
    decode_report: Callable[[bytes], Any]
    decode_details: Callable[[bytes], Any]

    @classmethod
    def of(cls, orders: Any, reports: Any, details: Any = None) -> Self:
        """Make the decoders. `orders` and `reports` are unions of tagged structs; a joining rank sends `details`."""
        return cls(
            codec.decoder(Ping | orders, "order to a rank"),
            codec.decoder(Join | GiveUp | reports, "report of a rank"),
            codec.decoder(details, "details of a rank"),
        )


class GroupRank(NamedTuple):
    """A rank other than 0, and the key with which it connects to rank 0 of its group."""

    rank: int
    size: int  # of the group
    key: ClusterKey | None  # of the sockets. None: any process may connect, for tests only


class GroupSocket:
    """The socket at which the other ranks of a group reach rank 0. The constructor binds it.

    Without a `key` any process may join: for tests only.
    """

    def __init__(self, size: int, host: str, key: ClusterKey | None) -> None:
        self.size = size
        self.channel = ZmqChannel(host, key, heartbeat_timeout_s=GROUP_HEARTBEAT_TIMEOUT_S)
        self.address = self.channel.address
        self._closed = False

    def close(self) -> None:
        """Close the channel, since garbage collection of open sockets may hang. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.channel.close()


class GroupLeader:
    """Rank 0's connections to the other ranks for one service. One thread uses it.

    Calls raise `RankLost` once a rank is gone, gives up or sends malformed bytes; the group must end then.
    """

    def __init__(
        self,
        channel: Channel,
        size: int,
        fingerprint: str,
        service: Service,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fingerprint` identifies the KV layout, which must be the same on all ranks."""
        self._channel = channel
        self._size = size
        self._fingerprint = fingerprint
        self._service = service
        self._clock = clock
        self._routes: dict[int, Route] = {}
        self._ranks: dict[Route, int] = {}
        self.details: dict[int, Any] = {}  # by rank, from `Join`

    @property
    def ranks(self) -> list[int]:
        return sorted(self._routes)

    def gather(self, wait: Callable[[float], None], timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Wait until all ranks have joined. `wait(seconds)` may return early.

        Raises `TransportError` if a rank does not join in time, does not fit, or gives up.
        """
        deadline = self._clock() + timeout_s
        while missing := [rank for rank in range(1, self._size) if rank not in self._routes]:
            if self._clock() >= deadline:
                raise TransportError(f"of {self._size} ranks these did not join within {timeout_s:g} s: {missing}")
            wait(deadline - self._clock())
            for route, data in self._channel.receive():
                self._take_join(route, data)

    def send(self, rank: int, order: msgspec.Struct) -> None:
        if not self._channel.send(self._routes[rank], codec.encode(order)):
            raise RankLost(f"the connection to rank {rank} is broken")

    def broadcast(self, order: msgspec.Struct) -> None:
        """Send an order to all other ranks."""
        for rank in self.ranks:
            self.send(rank, order)

    def ping(self, rank: int) -> None:
        self.send(rank, Ping())

    def receive(self) -> list[tuple[int, Any]]:
        """Return the reports that have arrived, each with its rank."""
        reports: list[tuple[int, Any]] = []
        for route, data in self._channel.receive():
            rank = self._ranks.get(route)
            if rank is None:
                logger.warning("dropped: %d bytes from a process that is not of this group", len(data))
                continue
            try:
                report = self._service.decode_report(data)
            except MalformedMessage as error:
                raise RankLost(f"rank {rank} sends malformed bytes: {error}") from error
            if isinstance(report, GiveUp):
                raise RankLost(f"rank {rank} cannot go on: {report.reason}")
            reports.append((rank, report))
        return reports

    def _take_join(self, route: Route, data: bytes) -> None:
        """Handle a `Join` or `GiveUp`, and drop anything else. A rank that leaves right after is noticed later."""
        try:
            message = self._service.decode_report(data)
            details = self._service.decode_details(message.details) if isinstance(message, Join) else None
        except MalformedMessage as error:
            logger.warning("dropped: %s", error)
            return
        match message:
            case Join():
                self._check(message)
                self._routes[message.rank], self._ranks[route] = route, message.rank
                self.details[message.rank] = details
            case GiveUp():
                raise TransportError(f"rank {message.rank} cannot go on: {message.reason}")
            case _:
                logger.warning("dropped: a %s from a process that has not joined", type(message).__name__)

    def _check(self, join: Join) -> None:
        if join.rank >= self._size or join.rank in self._routes:
            raise TransportError(f"rank {join.rank} joined a group of {self._size} ranks that has no place for it")
        if join.fingerprint != self._fingerprint:
            raise TransportError(
                f"rank {join.rank} keeps blocks of layout {join.fingerprint}, rank 0 of {self._fingerprint}"
            )


class OrderHandler(Protocol):
    """Carries out the orders of one service on a rank other than 0. One thread uses it."""

    def details(self) -> Any:
        """Return the details that this rank sends to rank 0 when it joins."""
        ...

    def handle(self, order: Any) -> Iterable[msgspec.Struct]:
        """Carry out an order and yield reports. Raises `MalformedMessage` for an invalid order."""
        ...

    def advance(self) -> tuple[Iterable[msgspec.Struct], float]:
        """Continue the work of earlier orders. Returns reports, and the seconds until the next call."""
        ...

    def close(self) -> None: ...


class GroupMember:
    """A rank's end of the connection to rank 0: it passes orders to `handler` and sends the handler's reports.

    It has no thread and never sleeps. `pump` raises the handler's errors, and `RankLost`.
    """

    def __init__(
        self, handler: OrderHandler, service: Service, *, rank: int, fingerprint: str, channel: Channel, leader: Route
    ) -> None:
        """Join the group. Rank 0 may send orders from now on."""
        self._handler, self._service = handler, service
        self._channel, self._leader = channel, leader
        self._report(Join(rank, fingerprint, msgspec.Raw(codec.encode(handler.details()))))

    def pump(self) -> float:
        """Do one round of everything. Returns the longest pause in seconds; an order ends it earlier."""
        for _, data in self._channel.receive():
            order = self._service.decode_order(data)
            if not isinstance(order, Ping):
                for report in self._handler.handle(order):
                    self._report(report)
        reports, pause_s = self._handler.advance()
        for report in reports:
            self._report(report)
        return pause_s

    def close(self) -> None:
        self._handler.close()

    def _report(self, report: msgspec.Struct) -> None:
        """Send a report. Raises `RankLost` if it is dropped, since rank 0 would wait for it."""
        if not self._channel.send(self._leader, codec.encode(report)):
            raise RankLost("rank 0 takes no reports any more")


class MemberThread:
    """A `GroupMember` in a thread of its own. Ranks 1, 2, ... have one for each service."""

    def __init__(
        self,
        begin: Callable[[Channel, Route], GroupMember],
        me: GroupRank,
        *,
        leader: str,
        name: str,
    ) -> None:
        """Connect to rank 0, whose socket is at `leader`. The thread calls `begin` with that connection.

        Raises `TransportError` for an invalid address.
        """
        self._begin, self._rank = begin, me.rank
        self._channel = ZmqChannel(None, me.key, heartbeat_timeout_s=GROUP_HEARTBEAT_TIMEOUT_S)
        try:
            self._leader = self._channel.connect(leader)
        except TransportError:
            self._channel.close()
            raise
        self._is_waited_for = False
        self._thread = ChannelThread(name, self._channel, self._run)

    def open(self, timeout_s: float) -> Self:
        """Start the thread and wait until it has joined. Raises an error of `begin`, which rank 0 does not learn."""
        self._is_waited_for = True
        self._thread.open(timeout_s)
        return self

    def start(self) -> Self:
        """Start the thread without waiting. An error of `begin` is sent to rank 0."""
        self._thread.start()
        return self

    def close(self) -> None:
        """End the thread after its current work. One that has not ended in time is logged, and left running."""
        self._thread.close()

    def _run(self, ready: Callable[[], None]) -> None:
        member = None
        try:
            member = self._begin(self._channel, self._leader)
            ready()
            while not self._thread.is_closing:
                self._channel.wait(member.pump())
        except Exception as error:
            if member is None and self._is_waited_for:
                raise
            logger.exception("%s died", self._thread.name)
            reason = f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]
            self._channel.send(self._leader, codec.encode(GiveUp(self._rank, reason)))  # if rank 0 still listens
        if member is not None:
            member.close()


class TpCopyGroup:
    """Rank 0's side of copies on all ranks. The constructor waits until the others have joined. One thread uses it.

    While rank 0 waits for an answer, it tests the connection with pings, so that it notices at once when a rank dies.
    It waits for a slow rank however long that takes, since the blocks must not be used while the rank reads or writes
    them.

    Raises `TransportError` if a rank does not join in time or does not fit. Calls raise `RankLost` once one is gone.
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
        """Send an order to all other ranks."""
        self._leader.broadcast(order)

    def answers(self, kind: type[Report]) -> list[Report]:
        """Return the next report of each rank, ordered by rank, however long that takes."""
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
