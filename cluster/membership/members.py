"""The list of an application's members, with their ranks and orders to leave: the directory's state.

UNKNOWN ──register──> LISTED ──set_draining──> LISTED as draining ──remove──> UNKNOWN
                        └──────── remove, or silent for long (`member_probe.py`) ─┘
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.cluster.contracts import (
    DirectorySnapshot,
    DrainCounters,
    EngineGroup,
    EngineRecord,
    GatewayRecord,
    StartingGroup,
)

from .member_probe import BUSY_S, MISSED_AFTER_S, SUSPECT_AFTER_S, TRUSTED_S, ProcessState

STARTING_S = 20.0  # of silence, after which a starting group is taken for gone


class HeartbeatReply(enum.StrEnum):
    """The directory's answer to a heartbeat."""

    UNKNOWN = "unknown"  # register again
    LISTED = "listed"
    LEAVE = "leave"  # drain, and end


class NoSuchRank(ValueError):
    """No engine of the application has this rank now."""


@dataclass
class ListedMember:
    """A group or a gateway, with its latest signs of life."""

    heartbeat_s: float
    group: EngineGroup | None = None
    gateway: GatewayRecord | None = None
    process_state: ProcessState | None = None  # by the last probe since its last heartbeat
    answered_s: float = -math.inf  # when a probe last found its process running

    @property
    def addresses(self) -> list[str]:
        """Return the addresses at which its processes listen."""
        if self.group is not None:
            return [engine.address for engine in self.group.engines]
        return [self.gateway.life_address] if self.gateway is not None and self.gateway.life_address else []

    def is_gone(self, now: float) -> bool:
        silent_s = now - self.heartbeat_s
        return silent_s > BUSY_S or (silent_s > MISSED_AFTER_S and now - self.answered_s > TRUSTED_S)

    @property
    def epoch(self) -> int | None:
        return None if self.group is None else self.group.epoch


class Membership:
    """The list of members and its versions. It uses neither Ray nor a clock of its own.

    Versions count up from `first_version`; a restarted directory must not repeat versions of its predecessor. Its list
    is not complete until `complete` is called.
    """

    def __init__(self, clock: Callable[[], float], first_version: int, *, is_complete: bool = True) -> None:
        self._clock = clock
        self._is_complete = is_complete
        self._members: dict[str, ListedMember] = {}
        self._to_leave: set[str] = set()  # groups that were asked to leave, also those that are cut off and not listed
        self._starting: dict[str, tuple[float, StartingGroup]] = {}  # by group, with the time of its last message
        self.version = first_version
        self.drains = DrainCounters()
        self.num_kept = 0  # silent members that stayed listed because their processes ran

    def __len__(self) -> int:
        return len(self._members)

    def complete(self) -> None:
        """Note that members which are not listed by now are gone."""
        if not self._is_complete:
            self._is_complete = True
            self.version += 1

    def add_group(self, group: EngineGroup) -> EngineGroup:
        """List a group, and give its engines ranks.

        A group that returns gets its former ranks if they are free. Otherwise it gets the first free run of its fleet's
        ranks, which are divided into runs of a group's size.
        """
        self._starting.pop(group.group_id, None)
        known = self._members.get(group.group_id)
        if known is not None and known.group is not None and known.epoch == group.epoch:
            known.heartbeat_s = self._clock()
            self.set_draining(group.group_id, group.epoch, group.draining)
            return known.group
        taken = {engine.rank for name, engine in self._engines() if name != group.group_id}
        size = len(group.engines)
        had = range(group.engines[0].rank, group.engines[0].rank + size)
        runs = (range(start, start + size) for start in itertools.count(group.first_rank, size))
        if had.start < 0 or taken.intersection(had):
            had = next(run for run in runs if not taken.intersection(run))
        engines = [msgspec.structs.replace(engine, rank=rank) for engine, rank in zip(group.engines, had, strict=True)]
        listed = msgspec.structs.replace(group, engines=engines)
        if group.draining:  # an earlier directory has asked it to leave: it must not stay now
            self._to_leave.add(group.group_id)
        self._members[group.group_id] = ListedMember(self._clock(), group=listed)
        self.version += 1
        return listed

    def note_starting(self, group: StartingGroup) -> None:
        """Note what a group that is not listed yet is doing. A message that comes too late is ignored."""
        if group.group_id in self._members:
            return
        _, known = self._starting.get(group.group_id, (0.0, None))
        self._starting[group.group_id] = self._clock(), group
        if known != group:
            self.version += 1

    def add_gateway(self, record: GatewayRecord) -> None:
        known = self._members.get(record.identity)
        if known is None or known.gateway != record:
            self.version += 1
        self._members[record.identity] = ListedMember(self._clock(), gateway=record)

    def remove(self, name: str, epoch: int | None = None) -> bool:
        """Remove a member; a group only if it still has this epoch. Return whether it was listed."""
        member = self._members.get(name)
        if member is None or (epoch is not None and member.epoch not in (None, epoch)):
            return False
        del self._members[name]
        self.version += 1
        return True

    def note_heartbeat(self, name: str, epoch: int | None = None) -> HeartbeatReply:
        """Note a member's heartbeat, and return the reply."""
        member = self._members.get(name)
        if member is None or member.epoch not in (None, epoch):
            return HeartbeatReply.UNKNOWN
        member.heartbeat_s, member.process_state = self._clock(), None
        return HeartbeatReply.LEAVE if name in self._to_leave else HeartbeatReply.LISTED

    def set_draining(self, group_id: str, epoch: int, draining: bool) -> None:
        """Mark a group as draining or not. A group that is not listed is ignored."""
        member = self._members.get(group_id)
        if member is None or member.group is None or member.epoch != epoch:
            return
        group = member.group.with_draining(draining)
        if group != member.group:
            member.group = group
            self.version += 1

    def ask_to_leave(self, group_id: str, leave: bool = True) -> None:
        """Ask a group to leave, or to stay after all, in the reply to its next heartbeat, however late that comes."""
        if leave:
            self._to_leave.add(group_id)
        else:
            self._to_leave.discard(group_id)

    def group_with(self, rank: int) -> EngineGroup:
        """Return the group that has this rank. Raises `NoSuchRank`."""
        for group in self.groups():
            if any(engine.rank == rank for engine in group.engines):
                return group
        ranks = ", ".join(str(engine.rank) for engine in self.snapshot().engines)
        raise NoSuchRank(f"there is no rank {rank} now; there are: {ranks or 'none'}")

    def groups(self) -> list[EngineGroup]:
        return [member.group for member in self._members.values() if member.group is not None]

    def skip_stall(self, stalled_s: float) -> None:
        """Do not count a time in which this process was stopped and received nothing."""
        now = self._clock()
        for member in self._members.values():
            member.heartbeat_s = min(now, member.heartbeat_s + stalled_s)

    def suspects(self) -> dict[str, list[str]]:
        """Return the members whose heartbeats are missing, with the addresses to probe."""
        now = self._clock()
        return {
            name: member.addresses
            for name, member in self._members.items()
            if now - member.heartbeat_s > SUSPECT_AFTER_S and member.addresses
        }

    def note_probe(self, name: str, state: ProcessState) -> bool:
        """Note the state of a suspect's process.

        Return True if this keeps it listed for the first time in this silence.
        """
        member, now = self._members.get(name), self._clock()
        if member is None or now - member.heartbeat_s <= SUSPECT_AFTER_S:
            return False
        is_new = state is ProcessState.RUNS and member.process_state is not ProcessState.RUNS
        member.process_state = state
        if state is ProcessState.RUNS:
            member.answered_s = now
        if is_new:
            self.num_kept += 1
        return is_new

    def remove_silent(self) -> list[str]:
        """Remove members that are gone; return their names, each with the state of its processes."""
        now = self._clock()
        for name in [name for name, (heard_s, _) in self._starting.items() if now - heard_s > STARTING_S]:
            del self._starting[name]
            self.version += 1
        gone = {name: member for name, member in self._members.items() if member.is_gone(now)}
        for name in gone:
            self.remove(name)
        return [
            name if member.process_state is None else f"{name} ({member.process_state.value})"
            for name, member in gone.items()
        ]

    def snapshot(self) -> DirectorySnapshot:
        engines = sorted((engine for _, engine in self._engines()), key=lambda engine: engine.rank)
        gateways = [member.gateway for member in self._members.values() if member.gateway is not None]
        starting = [group for _, group in self._starting.values()]
        return DirectorySnapshot(self.version, engines, gateways, starting=starting, is_complete=self._is_complete)

    def _engines(self) -> Iterator[tuple[str, EngineRecord]]:
        """Yield all engines, each with the name of its group."""
        for name, member in self._members.items():
            if member.group is not None:
                yield from ((name, engine) for engine in member.group.engines)


class DirectoryMetrics(Collector):
    """Collects the directory's counts."""

    def __init__(self, members: Membership) -> None:
        self._members = members

    def collect(self) -> Iterator[Metric]:
        drains = self._members.drains
        yield CounterMetricFamily("baton_drains_total", "Groups of engines that drained.", drains.groups)
        yield CounterMetricFamily("baton_drain_seconds_total", "Seconds that drains took, summed.", drains.seconds)
        help = "Requests that went on elsewhere when the drain's time was over."
        yield CounterMetricFamily("baton_drain_handed_over_total", help, drains.handed_over)
        help = "Gateways and groups of engines without heartbeats that were kept, since their processes ran."
        yield CounterMetricFamily("baton_members_kept_total", help, self._members.num_kept)
