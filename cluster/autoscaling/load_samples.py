"""Measurements for the autoscaler: reports of gateways and engines become one list of samples.

gateways ── GatewayLoad ──┐
                          ├──> CounterSums ── Sample a second ──> policy
engines ─── EnginePulse ──┘

A counter in a report starts at 0 with its process; a counter in a sample starts at 0 with `CounterSums`: processes and
directories come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from baton.cluster.contracts import EngineGroup, EnginePulse, Role

# Upper bounds of the buckets of the gateways' histograms, in seconds; one more bucket holds larger values.
FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
PER_TOKEN_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)

NUM_ENGINE_COUNTERS = 5

Counts = tuple[float, ...]


class GatewayLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one gateway's requests; all but the last two are counters that start with its process."""

    requests: float = 0  # choices
    prompt_tokens: float = 0
    generation_tokens: float = 0
    first_token: Counts = (0.0,) * (len(FIRST_TOKEN_S) + 1)  # histogram of choices by seconds to their first token
    inter_token: Counts = (0.0,) * (len(PER_TOKEN_S) + 1)
    inflight: int = 0
    unplaced: int = 0  # requests that wait for an engine to exist


@dataclass(frozen=True)
class FleetLoad:
    """The state of one fleet's engines. `busy_s` to `steps` are sums over all engines that ever ran in it."""

    serving: int = 0  # groups that gateways may choose: neither draining nor starting
    busy_s: float = 0.0
    prompt_tokens: float = 0  # computed
    cached_tokens: float = 0  # found in the prefix cache
    generation_tokens: float = 0
    steps: float = 0
    live: int = 0  # requests in the engines
    waiting: int = 0  # those of `live` that have not begun
    used_blocks: int = 0
    blocks_of_a_group: float = 0


@dataclass(frozen=True)
class Sample:
    """The load of the application at one time."""

    at_s: float
    gateways: GatewayLoad = field(default_factory=GatewayLoad)
    fleets: Mapping[Role, FleetLoad] = field(default_factory=dict)

    def fleet(self, role: Role) -> FleetLoad:
        return self.fleets.get(role, FleetLoad())


class CounterSums:
    """Sums the counters of processes that come and go, so that no sum ever falls."""

    def __init__(self) -> None:
        self._totals: dict[str, Counts] = {}  # by kind of report
        self._last: dict[tuple[str, str], Counts] = {}  # by kind and process

    def add(self, kind: str, process: str, counters: Counts) -> None:
        """Add the newest report of one process. If a counter fell, a new process has taken the old one's place.

        The first report of a process only sets the values to count from: its counts date from before this object
        existed, or were already added before the process was out of reach for a while.
        """
        before = self._last.get((kind, process), counters)
        if any(new < old for new, old in zip(counters, before, strict=True)):
            before = (0.0,) * len(counters)
        self._last[kind, process] = counters
        total = self._totals.get(kind, (0.0,) * len(counters))
        self._totals[kind] = tuple(sum + new - old for sum, new, old in zip(total, counters, before, strict=True))

    def keep(self, processes: Iterable[str]) -> None:
        """Forget all other processes; what they have counted stays in the sums."""
        alive = set(processes)
        self._last = {key: counters for key, counters in self._last.items() if key[1] in alive}

    def total(self, kind: str, size: int) -> Counts:
        return self._totals.get(kind, (0.0,) * size)


class LoadReports:
    """Holds the newest report of each process, and takes samples."""

    def __init__(self) -> None:
        self._meter = CounterSums()
        self._gateways: dict[str, GatewayLoad] = {}
        self._pulses: dict[str, list[EnginePulse]] = {}  # by group

    def update_gateway(self, identity: str, load: GatewayLoad) -> None:
        self._gateways[identity] = load
        self._meter.add("gateways", identity, _gateway_counters(load))

    def update_group(self, group: EngineGroup, pulses: list[EnginePulse]) -> None:
        self._pulses[group.group_id] = pulses
        for engine, pulse in zip(group.engines, pulses, strict=True):
            self._meter.add(engine.role, f"{engine.engine_id}/{engine.epoch}", _engine_counters(pulse))

    def num_live(self, group_id: str) -> int:
        """Count a group's requests, leases and hand-offs: it can end without loss only when they have."""
        return sum(pulse.num_live for pulse in self._pulses.get(group_id, ()))

    def sample(self, now_s: float, gateways: Iterable[str], groups: Sequence[EngineGroup]) -> Sample:
        """Sample the load of the present members."""
        alive = set(gateways)
        self._gateways = {name: load for name, load in self._gateways.items() if name in alive}
        self._pulses = {group.group_id: self._pulses.get(group.group_id, []) for group in groups}
        engines = (f"{engine.engine_id}/{engine.epoch}" for group in groups for engine in group.engines)
        self._meter.keep([*alive, *engines])
        return Sample(now_s, self._all_gateways(), {role: self._fleet(role, groups) for role in Role})

    def _all_gateways(self) -> GatewayLoad:
        counters = self._meter.total("gateways", 3 + len(FIRST_TOKEN_S) + 1 + len(PER_TOKEN_S) + 1)
        split = 3 + len(FIRST_TOKEN_S) + 1
        return GatewayLoad(
            requests=counters[0],
            prompt_tokens=counters[1],
            generation_tokens=counters[2],
            first_token=counters[3:split],
            inter_token=counters[split:],
            inflight=sum(load.inflight for load in self._gateways.values()),
            unplaced=sum(load.unplaced for load in self._gateways.values()),
        )

    def _fleet(self, role: Role, groups: Sequence[EngineGroup]) -> FleetLoad:
        own = [group for group in groups if group.engines[0].role is role]
        stats = [pulse.stats for group in own for pulse in self._pulses[group.group_id] if pulse.stats is not None]
        busy_s, prompt_tokens, cached_tokens, generation_tokens, steps = self._meter.total(role, NUM_ENGINE_COUNTERS)
        return FleetLoad(
            serving=sum(not group.draining for group in own),
            busy_s=busy_s,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            generation_tokens=generation_tokens,
            steps=steps,
            live=sum(each.num_requests for each in stats),
            waiting=sum(each.num_requests_waiting for each in stats),
            used_blocks=sum(each.num_blocks - each.num_blocks_left for each in stats),
            blocks_of_a_group=sum(each.num_blocks for each in stats) / len(own) if own else 0.0,
        )


def _gateway_counters(load: GatewayLoad) -> Counts:
    return (load.requests, load.prompt_tokens, load.generation_tokens, *load.first_token, *load.inter_token)


def _engine_counters(pulse: EnginePulse) -> Counts:
    """Return the counters of an engine in the order in which `LoadReports` reads them."""
    stats = pulse.stats
    if stats is None:
        return (pulse.busy_s, *(0.0,) * (NUM_ENGINE_COUNTERS - 1))
    return (pulse.busy_s, stats.prompt_tokens, stats.prefix_cache_hits, stats.generation_tokens, stats.num_steps)


def bucket_of(bounds: Sequence[float], value: float) -> int:
    """Return the index of the bucket in which a histogram with these upper bounds counts a value."""
    return next((index for index, bound in enumerate(bounds) if value <= bound), len(bounds))


def percentile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float:
    """Return the value below which the share `share` of all counted values lies.

    Values are taken to be spread evenly within a bucket, and values above all bounds to equal the last bound. Returns
    0.0 if nothing was counted.
    """
    wanted, below = share * sum(counts), 0.0
    for index, count in enumerate(counts[:-1]):
        if count and below + count >= wanted:
            lower = bounds[index - 1] if index else 0.0
            return lower + (bounds[index] - lower) * (wanted - below) / count
        below += count
    return bounds[-1] if sum(counts) else 0.0
