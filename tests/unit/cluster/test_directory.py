"""The list of members under the directory actor, and the heartbeats that keep it alive. Without Ray."""

from __future__ import annotations

import asyncio

import pytest

from baton.cluster.contracts import Drained, EngineGroup, Role, StartingGroup
from baton.cluster.membership import directory_client
from baton.cluster.membership.directory import LOST_S, NO_MEMBER_S, AppLiveness
from baton.cluster.membership.directory_client import keep_app_alive
from baton.cluster.membership.members import (
    STARTING_S,
    DirectoryMetrics,
    HeartbeatReply,
    Membership,
    NoSuchRank,
)

from ...helpers.fakes import make_gateway
from .engine_groups import group_of


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def members(clock: Clock) -> Membership:
    return Membership(clock, first_version=100)


def alone(engine_id: str, *, epoch: int = 1, rank: int = -1) -> EngineGroup:
    """Return a group of one engine."""
    return group_of(engine_id, size=1, epoch=epoch, rank=rank)


def listed(members: Membership) -> list[tuple[str, int, int]]:
    return [(record.engine_id, record.epoch, record.rank) for record in members.snapshot().engines]


def test_engines_get_the_lowest_free_rank(members: Membership) -> None:
    for name in "abc":
        members.add_group(alone(name))
    assert listed(members) == [("a", 1, 0), ("b", 1, 1), ("c", 1, 2)]
    members.remove("b")
    members.add_group(alone("d"))
    assert listed(members) == [("a", 1, 0), ("d", 1, 1), ("c", 1, 2)]


def test_the_ranks_of_a_group_are_consecutive_within_its_fleet(members: Membership) -> None:
    members.add_group(group_of("d", size=2, first_rank=2))
    members.add_group(group_of("e", size=2, first_rank=2))
    members.add_group(group_of("p", size=1, first_rank=0))
    assert listed(members) == [("p", 1, 0), ("d0", 1, 2), ("d1", 1, 3), ("e0", 1, 4), ("e1", 1, 5)]
    members.remove("d")
    members.add_group(group_of("f", size=2, epoch=9, first_rank=2))
    assert listed(members)[1:3] == [("f0", 9, 2), ("f1", 9, 3)]


def test_a_group_whose_ranks_are_partly_taken_gets_other_consecutive_ranks(members: Membership) -> None:
    members.add_group(alone("a", rank=1))
    members.add_group(group_of("d", size=2, rank=0))
    assert listed(members) == [("a", 1, 1), ("d0", 1, 2), ("d1", 1, 3)]


def test_an_engine_that_returns_after_a_restart_keeps_its_rank(clock: Clock) -> None:
    members = Membership(clock, first_version=1)
    members.add_group(alone("c", rank=2))
    members.add_group(alone("new"))
    assert listed(members) == [("new", 1, 0), ("c", 1, 2)]


def test_a_rank_that_is_taken_meanwhile_is_replaced(members: Membership) -> None:
    members.add_group(alone("a", rank=0))
    members.add_group(alone("b", rank=0))
    assert listed(members) == [("a", 1, 0), ("b", 1, 1)]


def test_registering_twice_changes_nothing(members: Membership) -> None:
    first = members.add_group(alone("a"))
    version = members.version
    assert members.add_group(alone("a")) == first
    assert members.version == version


def test_a_process_that_starts_anew_replaces_the_old_one(members: Membership) -> None:
    members.add_group(alone("a", epoch=1))
    members.add_group(alone("a", epoch=2))
    assert listed(members) == [("a", 2, 0)]
    assert not members.remove("a", epoch=1), "a late message of the old process must not remove the new one"
    assert listed(members) == [("a", 2, 0)]


def test_every_change_raises_the_version(members: Membership) -> None:
    versions = [members.version]
    members.add_gateway(make_gateway("g"))
    versions.append(members.version)
    members.add_group(alone("a"))
    versions.append(members.version)
    members.remove("g")
    versions.append(members.version)
    assert versions == sorted(set(versions))
    assert versions[0] == 100


def test_a_heartbeat_of_an_unknown_member_asks_it_to_register(members: Membership) -> None:
    assert members.note_heartbeat("a", 1) is HeartbeatReply.UNKNOWN
    members.add_group(alone("a", epoch=1))
    assert members.note_heartbeat("a", 1) is HeartbeatReply.LISTED
    assert members.note_heartbeat("a", 2) is HeartbeatReply.UNKNOWN
    members.add_gateway(make_gateway("g"))
    assert members.note_heartbeat("g") is HeartbeatReply.LISTED


def test_a_draining_group_is_listed_as_draining_until_it_has_left(members: Membership) -> None:
    members.add_group(group_of("d", size=2))
    version = members.version
    members.set_draining("d", 1, True)
    assert [engine.draining for engine in members.snapshot().engines] == [True, True]
    assert members.version == version + 1
    members.set_draining("d", 1, True)
    assert members.version == version + 1, "a repeated message must not change the version"
    members.set_draining("d", 2, False)
    members.set_draining("nobody", 1, False)
    assert members.snapshot().engines[0].draining, "messages of other processes must change nothing"
    members.set_draining("d", 1, False)
    assert not any(engine.draining for engine in members.snapshot().engines)


def test_a_group_that_registers_again_says_whether_it_drains(members: Membership, clock: Clock) -> None:
    group = members.add_group(alone("a"))
    members.add_group(group.with_draining(True))
    assert members.snapshot().engines[0].draining
    fresh = Membership(clock, first_version=1)
    assert fresh.add_group(group.with_draining(True)).draining, "a restarted directory must learn it, too"


def test_members_that_a_restarted_directory_lacks_are_still_listed_until_its_list_is_complete(clock: Clock) -> None:
    before = Membership(clock, first_version=1)
    for group in (alone("lost", rank=0), alone("new process", epoch=1, rank=1), alone("found", rank=2)):
        before.add_group(group)
    for gateway in ("lost gateway", "found gateway"):
        before.add_gateway(make_gateway(gateway))
    members = Membership(clock, first_version=100, is_complete=False)
    members.add_group(alone("found", rank=2).with_draining(True))
    members.add_group(alone("new process", epoch=2, rank=1))
    members.add_gateway(make_gateway("found gateway"))

    partly = members.snapshot().completed_by(before.snapshot())
    assert [(record.engine_id, record.epoch, record.draining) for record in partly.engines] == [
        ("lost", 1, False),
        ("new process", 2, False),
        ("found", 1, True),
    ]
    assert {gateway.identity for gateway in partly.gateways} == {"lost gateway", "found gateway"}

    members.complete()
    assert members.snapshot().version > partly.version, "watchers would otherwise not get the complete list"
    assert members.snapshot().completed_by(partly) == members.snapshot()
    assert [record.engine_id for record in members.snapshot().engines] == ["new process", "found"]
    version = members.version
    members.complete()
    assert members.version == version


def test_a_group_found_by_any_rank_is_asked_to_leave_by_heartbeat_replies(members: Membership) -> None:
    members.add_group(group_of("d", size=2))
    group = members.group_with(1)
    members.ask_to_leave(group.group_id)
    assert members.note_heartbeat("d", 1) is HeartbeatReply.LEAVE
    members.ask_to_leave(group.group_id, leave=False)
    assert members.note_heartbeat("d", 1) is HeartbeatReply.LISTED
    with pytest.raises(NoSuchRank, match="no rank 2 now; there are: 0, 1"):
        members.group_with(2)


def test_a_draining_group_keeps_leaving_if_the_directory_has_forgotten_the_order(members: Membership) -> None:
    """A directory that restarted, or lost its connection to the group, must not ask it to stay."""
    members.add_group(alone("a").with_draining(True))
    assert members.note_heartbeat("a", 1) is HeartbeatReply.LEAVE
    members.ask_to_leave("a", False)
    assert members.note_heartbeat("a", 1) is HeartbeatReply.LISTED


def test_an_order_to_leave_reaches_a_group_that_was_silent_for_so_long_that_it_was_dropped(
    members: Membership, clock: Clock
) -> None:
    members.add_group(alone("a"))
    clock.now_s = 5.0
    members.ask_to_leave("a")
    clock.now_s = 7.0
    assert members.remove_silent() == ["a"]
    assert members.note_heartbeat("a", 1) is HeartbeatReply.UNKNOWN
    members.add_group(alone("a"))
    assert members.note_heartbeat("a", 1) is HeartbeatReply.LEAVE
    members.ask_to_leave("a", leave=False)
    assert members.note_heartbeat("a", 1) is HeartbeatReply.LISTED


def test_time_while_the_directory_was_stopped_does_not_count_as_silence(members: Membership, clock: Clock) -> None:
    members.add_group(alone("a"))
    clock.now_s = 5.0
    members.add_group(alone("b"))
    clock.now_s = 15.0
    members.skip_stall(9.0)
    assert members.remove_silent() == []
    clock.now_s = 15.5
    assert members.remove_silent() == ["a"], "it was silent for 6.5 s apart from the stall"
    clock.now_s = 22.0
    assert members.remove_silent() == ["b"]


def test_drains_are_counted_and_exported(members: Membership) -> None:
    members.drains = members.drains.plus(Drained(2.0, 3)).plus(Drained(1.0, 0))
    values = [sample.value for family in DirectoryMetrics(members).collect() for sample in family.samples]
    assert values == [2, 3.0, 3, 0]


def test_silent_members_are_removed_and_others_stay(members: Membership, clock: Clock) -> None:
    members.add_group(alone("a", epoch=1))
    members.add_gateway(make_gateway("g"))
    clock.now_s = 4.0
    members.note_heartbeat("g")
    clock.now_s = 7.0
    assert members.remove_silent() == ["a"]
    assert listed(members) == []
    assert [gateway.identity for gateway in members.snapshot().gateways] == ["g"]
    assert members.remove_silent() == []


async def test_a_starting_member_reports_repeatedly_that_the_application_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[object, ...]] = []
    fourth = asyncio.Event()

    class Listener:
        async def call(self, method: str, *args: object) -> None:
            calls.append((method, *args))
            if len(calls) == 4:
                fourth.set()

    monkeypatch.setattr(directory_client, "KEEP_ALIVE_S", 0.01)
    group = StartingGroup("a", Role.UNIFIED, "10.0.0.1", "fetches demo/model")
    async with keep_app_alive(Listener(), lambda: group):  # type: ignore[arg-type]
        await asyncio.wait_for(fourth.wait(), 60)
    said = len(calls)
    assert set(calls) == {("application_lives", group)}
    await asyncio.sleep(0.05)
    assert len(calls) == said


def test_a_starting_group_is_shown_until_it_is_listed_or_silent(members: Membership, clock: Clock) -> None:
    def told() -> list[str]:
        return [f"{group.group_id} {group.state}" for group in members.snapshot().starting]

    def note(name: str, state: str) -> int:
        members.note_starting(StartingGroup(name, Role.UNIFIED, "10.0.0.1", state))
        return members.version

    first = note("a", "fetches")
    assert note("a", "fetches") == first  # a repeated state is no change for watchers
    assert note("a", "loads the model") > first
    clock.now_s = STARTING_S - 1.0
    note("b", "fetches")
    assert told() == ["a loads the model", "b fetches"]
    members.add_group(alone("b"))
    note("b", "comes late")
    assert told() == ["a loads the model"]
    clock.now_s = STARTING_S + 0.5
    version = members.version
    assert members.remove_silent() == []
    assert told() == []
    assert members.version > version


def test_an_application_whose_members_have_left_is_soon_gone(clock: Clock) -> None:
    liveness = AppLiveness(clock)
    clock.now_s = NO_MEMBER_S
    liveness.note_heartbeat()
    clock.now_s += NO_MEMBER_S
    assert not liveness.is_gone
    clock.now_s += 1.0
    assert liveness.is_gone


def test_an_application_with_lost_members_is_gone_only_after_ray_would_have_ended_them(clock: Clock) -> None:
    """A successor would have another cluster key, with which returning members could not talk to new ones."""
    liveness = AppLiveness(clock)
    liveness.lost()
    clock.now_s = LOST_S
    assert not liveness.is_gone
    liveness.note_heartbeat()
    clock.now_s += NO_MEMBER_S + 1.0
    assert liveness.is_gone, "after later members have left, the lost ones must not count any more"
    liveness.note_heartbeat()
    liveness.lost()
    clock.now_s += LOST_S + 1.0
    assert liveness.is_gone


def test_an_application_is_not_gone_after_its_directory_was_stopped_for_a_while(clock: Clock) -> None:
    liveness = AppLiveness(clock)
    clock.now_s = 100.0
    liveness.skip_stall(90.0)
    assert not liveness.is_gone
