"""Who is alive, without Ray: the list under the directory actor, and how its members keep it alive."""

from __future__ import annotations

import asyncio

import pytest
from fakes import make_record

from baton.cluster import directory
from baton.cluster.directory import Membership, presence


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


def listed(members: Membership) -> list[tuple[str, int, int]]:
    return [(record.engine_id, record.epoch, record.rank) for record in members.snapshot().engines]


def test_engines_get_the_lowest_free_rank(members: Membership) -> None:
    for name in "abc":
        members.add_engine(make_record(engine_id=name, rank=-1))
    assert listed(members) == [("a", 1, 0), ("b", 1, 1), ("c", 1, 2)]
    members.remove("b")
    members.add_engine(make_record(engine_id="d", rank=-1))
    assert listed(members) == [("a", 1, 0), ("d", 1, 1), ("c", 1, 2)]


def test_an_engine_that_returns_after_a_restart_keeps_its_rank(clock: Clock) -> None:
    members = Membership(clock, first_version=1)
    members.add_engine(make_record(engine_id="c", rank=2))
    members.add_engine(make_record(engine_id="new", rank=-1))
    assert listed(members) == [("new", 1, 0), ("c", 1, 2)]


def test_a_rank_that_is_taken_meanwhile_is_replaced(members: Membership) -> None:
    members.add_engine(make_record(engine_id="a", rank=0))
    members.add_engine(make_record(engine_id="b", rank=0))
    assert listed(members) == [("a", 1, 0), ("b", 1, 1)]


def test_registering_twice_changes_nothing(members: Membership) -> None:
    first = members.add_engine(make_record(engine_id="a", rank=-1))
    version = members.version
    assert members.add_engine(make_record(engine_id="a", rank=-1)) == first
    assert members.version == version


def test_a_process_that_starts_anew_replaces_the_old_one(members: Membership) -> None:
    members.add_engine(make_record(engine_id="a", epoch=1, rank=-1))
    members.add_engine(make_record(engine_id="a", epoch=2, rank=-1))
    assert listed(members) == [("a", 2, 0)]
    assert not members.remove("a", epoch=1), "late news of the old process must not remove the new one"
    assert listed(members) == [("a", 2, 0)]


def test_every_change_has_a_higher_version_than_the_last(members: Membership) -> None:
    versions = [members.version]
    members.add_gateway("g")
    versions.append(members.version)
    members.add_engine(make_record(engine_id="a", rank=-1))
    versions.append(members.version)
    members.remove("g")
    versions.append(members.version)
    assert versions == sorted(set(versions))
    assert versions[0] == 100


def test_a_heartbeat_of_an_unknown_member_asks_it_to_register(members: Membership) -> None:
    assert not members.heard("a", 1)
    members.add_engine(make_record(engine_id="a", epoch=1, rank=-1))
    assert members.heard("a", 1)
    assert not members.heard("a", 2)
    members.add_gateway("g")
    assert members.heard("g")


def test_those_that_fall_silent_are_removed_and_others_stay(members: Membership, clock: Clock) -> None:
    members.add_engine(make_record(engine_id="a", epoch=1, rank=-1))
    members.add_gateway("g")
    clock.now_s = 4.0
    members.heard("g")
    clock.now_s = 7.0
    assert members.remove_silent(6.0) == ["a"]
    assert listed(members) == []
    assert members.snapshot().gateways == ["g"]
    assert members.remove_silent(6.0) == []


async def test_a_member_that_starts_says_again_and_again_that_the_application_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    class Listener:
        async def call(self, method: str) -> None:
            calls.append(method)

    monkeypatch.setattr(directory, "PRESENCE_S", 0.01)
    async with presence(Listener()):  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
    said = len(calls)
    assert said > 3
    assert set(calls) == {"application_lives"}
    await asyncio.sleep(0.05)
    assert len(calls) == said
