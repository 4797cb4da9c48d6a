"""Orders and reports between the ranks of a group, and reports of failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest

from baton.kv_transfer.channel import Channel, Route
from baton.kv_transfer.errors import RankLost, TransportError
from baton.kv_transfer.group.rpc import IDLE_S, GroupMember, GroupRank, GroupSocket, MemberThread, Service, TpCopyGroup

pytestmark = pytest.mark.timeout(60)


class Count(msgspec.Struct, frozen=True, array_like=True, tag=10):
    up_to: int


class Counted(msgspec.Struct, frozen=True, array_like=True, tag=10):
    number: int


COUNTING = Service.of(Count, Counted)


class Counter:
    """A handler that reports every number below the given one, and fails at 3."""

    def __init__(self) -> None:
        self.closed = False

    def details(self) -> None:
        return None

    def handle(self, order: Count) -> Iterator[Counted]:
        for number in range(order.up_to):
            if number == 3:
                raise OverflowError("too many")
            yield Counted(number)

    def advance(self) -> tuple[Sequence[msgspec.Struct], float]:
        return (), IDLE_S

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def socket() -> Iterator[GroupSocket]:
    socket = GroupSocket(2, "127.0.0.1", None)
    yield socket
    socket.close()


def member_of(socket: GroupSocket, servant: Counter) -> MemberThread:
    def begin(channel: Channel, leader: Route) -> GroupMember:
        return GroupMember(servant, COUNTING, rank=1, fingerprint="f", channel=channel, leader=leader)

    return MemberThread(begin, GroupRank(1, 2, None), leader=socket.address, name="rank 1")


def take_answers(group: TpCopyGroup, count: int) -> None:
    for _ in range(count):
        group.answers(Counted)


def cannot_begin(channel: Channel, leader: Route) -> GroupMember:
    raise MemoryError("no memory to copy to")


def test_reports_come_in_order_and_an_order_may_have_several(socket: GroupSocket) -> None:
    member = member_of(socket, Counter()).start()
    group = TpCopyGroup(socket, "f", COUNTING)
    group.order(Count(2))
    group.order(Count(1))
    assert [group.answers(Counted) for _ in range(3)] == [[Counted(0)], [Counted(1)], [Counted(0)]]
    member.close()


def test_a_rank_that_fails_in_an_order_reports_the_reason_and_closes_its_handler(socket: GroupSocket) -> None:
    servant = Counter()
    member = member_of(socket, servant).start()
    group = TpCopyGroup(socket, "f", COUNTING)
    group.order(Count(4))
    with pytest.raises(RankLost, match="rank 1 cannot go on: OverflowError: too many"):
        take_answers(group, 4)
    member.close()
    assert servant.closed


def test_a_rank_that_cannot_begin_reports_to_rank_0(socket: GroupSocket) -> None:
    member = MemberThread(cannot_begin, GroupRank(1, 2, None), leader=socket.address, name="rank 1").start()
    with pytest.raises(TransportError, match="rank 1 cannot go on: MemoryError: no memory to copy to"):
        TpCopyGroup(socket, "f", COUNTING)
    member.close()


def test_a_rank_that_cannot_begin_may_retry_without_a_report_to_rank_0(
    socket: GroupSocket,
) -> None:
    """A rank whose blocks cannot be registered does so: it then joins with staging slots."""
    with pytest.raises(MemoryError, match="no memory to copy to"):
        MemberThread(cannot_begin, GroupRank(1, 2, None), leader=socket.address, name="rank 1").open(10.0)
    member = member_of(socket, Counter()).open(10.0)
    group = TpCopyGroup(socket, "f", COUNTING)
    group.order(Count(1))
    assert group.answers(Counted) == [Counted(0)]
    member.close()
