"""Simulates routing policies on equal requests, in virtual time: `baton bench router`."""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.progress import track
from rich.table import Column, Table

from baton.cluster.contracts import EngineView, Role
from baton.cluster.gateway.routing.load import Placement
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.messages import EngineOutput, EngineRequest, FinishReason
from baton.engine.core.sampling import SamplingParams

from .router_policies import OF_TIERS, POLICIES, Policy, PolicyMaker
from .traffic import RequestArrival, TrafficShape, shared, trace, unshared
from .virtual_engine import (
    NEVER_SLOW,
    SlowSpell,
    Speed,
    VirtualConnector,
    VirtualEngine,
    VirtualNetwork,
    VirtualTime,
    make_config,
    make_record,
)
from .virtual_tiers import VirtualTiers

CONVERSATIONS_PER_ENGINE = 8
SHARE_S = 30.0  # length of the periods for which the share of a slow engine is reported


@dataclass(frozen=True)
class SimulatedFleets:
    """The engines of a simulation: either unified ones, or prefill and decode engines."""

    num_unified: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    num_blocks: int = 8192  # of each engine
    num_gateways: int = 4
    num_host_blocks: int = 0  # in the host tier of each engine; 0: it has none
    num_disk_blocks: int = 0
    slow: SlowSpell = NEVER_SLOW  # of the first engine

    @property
    def num_tier_blocks(self) -> int:
        return self.num_host_blocks + self.num_disk_blocks


class SimulationReport(msgspec.Struct, frozen=True):
    """The figures of one policy. Times are in ms of virtual time."""

    policy: str
    num_requests: int
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float  # time from the first token to the last / number of tokens after the first
    tpot_p99_ms: float
    latency_p50_ms: float  # to the last token
    latency_p99_ms: float
    handed_off: float  # share of the requests
    hit_rate: float  # share of prompt tokens found in the prefix cache or restored, where the prompt was computed
    restored_rate: float  # share of prompt tokens restored from tiers
    imbalance: float  # prompt tokens computed by the busiest engine / their mean over engines that compute prompts
    first_engine: list[float]  # prompts computed by the first engine / its equal share, for each period `SHARE_S`


@dataclass
class _RoutedRequest:
    """A request in progress."""

    arrival: RequestArrival
    gateway: int
    request: EngineRequest
    placement: Placement
    first_s: float = 0.0
    last_s: float = 0.0
    num_cached: int = 0
    prefill_rank: int = 0  # rank of the engine that computed the prompt
    handed_off: bool = False


class _Gateway:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.outstanding: Counter[int] = Counter()  # by rank


class RouterSimulation:
    """One simulation. Call `run` once."""

    def __init__(self, fleets: SimulatedFleets, policy: str, speed: Speed) -> None:
        self._time = VirtualTime()
        self._policy = policy
        make_policy = (POLICIES | OF_TIERS)[policy]
        self.gateways = [_Gateway(make_policy(number, self._time)) for number in range(fleets.num_gateways)]
        counts = {Role.UNIFIED: fleets.num_unified, Role.PREFILL: fleets.num_prefill, Role.DECODE: fleets.num_decode}
        config = make_config(fleets.num_blocks)
        self.network = VirtualNetwork(self._time, speed)
        self.engines: list[VirtualEngine] = []
        for role in [role for role, count in counts.items() for _ in range(count)]:
            record = make_record(len(self.engines), role, fleets.num_blocks, fleets.num_tier_blocks)
            connector, tiers = VirtualConnector(record, self.network), self._tiers(fleets, speed)
            slow = NEVER_SLOW if self.engines else fleets.slow
            engine = VirtualEngine(record, config, self._time, speed, connector, self._on_output, tiers, slow)
            if tiers is not None:
                tiers.on_event = engine.wake
            self.engines.append(engine)
        self.served: dict[str, _RoutedRequest] = {}

    def _tiers(self, fleets: SimulatedFleets, speed: Speed) -> VirtualTiers | None:
        if not fleets.num_tier_blocks:
            return None
        return VirtualTiers(self._time, speed, fleets.num_host_blocks, fleets.num_disk_blocks)

    def run(self, arrivals: Sequence[RequestArrival]) -> SimulationReport:
        for index, arrival in enumerate(arrivals):
            self._time.after(arrival.at_s, functools.partial(self._arrive, index, arrival))
        self._time.run()
        return self._report()

    def _arrive(self, index: int, arrival: RequestArrival) -> None:
        number = index % len(self.gateways)
        sampling = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
        request = EngineRequest(request_id=f"r{index}", prompt_token_ids=arrival.prompt, sampling=sampling)
        placement, hands_off = self.gateways[number].policy.prefill_start(self._views(number), request)
        request = msgspec.structs.replace(request, keep_kv=hands_off)
        self.served[request.request_id] = _RoutedRequest(arrival, number, request, placement)
        self._send(request, number, placement)

    def _views(self, number: int) -> list[EngineView]:
        outstanding = self.gateways[number].outstanding
        return [engine.view(outstanding[engine.record.rank]) for engine in self.engines]

    def _send(self, request: EngineRequest, number: int, placement: Placement) -> None:
        gateway, rank = self.gateways[number], placement.engine.rank
        gateway.policy.sent(placement)
        gateway.outstanding[rank] += 1
        self.engines[rank].add(request)

    def _on_output(self, output: EngineOutput) -> None:
        served = self.served[output.request_id]
        gateway, now_s = self.gateways[served.gateway], self._time()
        assert output.error is None, output.error
        if not served.first_s:
            served.first_s, served.num_cached = now_s, output.num_cached_tokens
            served.prefill_rank = served.placement.engine.rank
            gateway.policy.first_token(served.placement)
        served.last_s = now_s
        if output.finish_reason is None:
            return
        gateway.policy.ended(served.placement)
        gateway.outstanding[served.placement.engine.rank] -= 1
        if output.finish_reason is FinishReason.HANDOFF:
            request = msgspec.structs.replace(
                served.request, keep_kv=False, kv_source=output.kv_source, output_token_ids=output.token_ids
            )
            source, served.handed_off = served.placement.engine, True
            placement = gateway.policy.decode_placement(self._views(served.gateway), request, source)
            served.placement = placement
            self._send(request, served.gateway, placement)

    def _report(self) -> SimulationReport:
        served = list(self.served.values())
        ttft_ms = [1e3 * (each.first_s - each.arrival.at_s) for each in served]
        tpot_ms = [
            1e3 * (each.last_s - each.first_s) / (each.arrival.output_tokens - 1)
            for each in served
            if each.arrival.output_tokens > 1
        ]
        latency_ms = [1e3 * (each.last_s - each.arrival.at_s) for each in served]
        num_prompt_tokens = sum(len(each.arrival.prompt) for each in served)
        work = [engine.prompt_tokens for engine in self.engines if engine.record.role is not Role.DECODE]
        return SimulationReport(
            policy=self._policy,
            num_requests=len(served),
            ttft_mean_ms=statistics.fmean(ttft_ms),
            ttft_p50_ms=statistics.median(ttft_ms),
            ttft_p99_ms=_p99(ttft_ms),
            tpot_mean_ms=statistics.fmean(tpot_ms) if tpot_ms else 0.0,
            tpot_p99_ms=_p99(tpot_ms),
            latency_p50_ms=statistics.median(latency_ms),
            latency_p99_ms=_p99(latency_ms),
            handed_off=statistics.fmean(each.handed_off for each in served),
            hit_rate=sum(each.num_cached for each in served) / num_prompt_tokens,
            restored_rate=sum(engine.restored_tokens for engine in self.engines) / num_prompt_tokens,
            imbalance=max(work) / statistics.fmean(work) if any(work) else 1.0,
            first_engine=self._shares_of_first(),
        )

    def _shares_of_first(self) -> list[float]:
        num_prefill = sum(engine.record.role is not Role.DECODE for engine in self.engines)
        every, first = (
            Counter(int(each.arrival.at_s // SHARE_S) for each in self.served.values() if each.prefill_rank in ranks)
            for ranks in (range(len(self.engines)), (0,))
        )
        return [num_prefill * first[number] / every[number] for number in sorted(every)]


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[round(0.99 * (len(values) - 1))] if values else 0.0


class InvalidSimulation(ValueError):
    """A simulation that cannot be run."""


class RouterRow(msgspec.Struct, frozen=True):
    traffic: str
    report: SimulationReport


def compare(
    fleets: SimulatedFleets,
    shape: TrafficShape,
    trace_file: Path | None,
    policies: Collection[str],
    speed: Speed = Speed(),
) -> list[RouterRow]:
    """Simulate all policies on all traffic, showing the progress. Raises `InvalidSimulation` and `InvalidTrace`."""
    _check(fleets, policies)
    traffic = _traffic(fleets, shape, trace_file)
    for name, arrivals in traffic.items():
        longest = max((len(arrival.prompt) + arrival.output_tokens for arrival in arrivals), default=0)
        if longest > fleets.num_blocks * BLOCK_SIZE:
            raise InvalidSimulation(
                f"{name}: {longest} tokens do not fit into {fleets.num_blocks} blocks of {BLOCK_SIZE}"
            )
    chosen = policies or _policies(fleets)
    pairs = [(name, policy) for name in traffic for policy in chosen]
    return [
        RouterRow(name, RouterSimulation(fleets, policy, speed).run(traffic[name]))
        for name, policy in track(pairs, description="replaying", transient=True)
    ]


def table(rows: Sequence[RouterRow], *, has_slow: bool = False) -> Table:
    """Tabulate the reports. Columns of hand-offs and restored tokens are left out if there are none.

    If the first engine is slow for a while, its share of the prompts is shown below.
    """
    columns = ["traffic", "policy", "TTFT mean", "p50", "p99 ms", "TPOT mean", "p99 ms", "whole p50", "p99 ms", "hits"]
    any_restored, any_handed_off = (
        any(getattr(row.report, share) for row in rows) for share in ("restored_rate", "handed_off")
    )
    names = [Column(name, no_wrap=True) for name in columns[:2]]  # never cut, even in a narrow terminal
    more = ["handed off"] * any_handed_off + ["restored"] * any_restored
    shown = Table(*names, *columns[2:], "busiest", *more)
    for row in rows:
        report = row.report
        shown.add_row(
            row.traffic,
            report.policy,
            *(f"{value:.0f}" for value in (report.ttft_mean_ms, report.ttft_p50_ms, report.ttft_p99_ms)),
            *(f"{value:.1f}" for value in (report.tpot_mean_ms, report.tpot_p99_ms)),
            *(f"{value:.0f}" for value in (report.latency_p50_ms, report.latency_p99_ms)),
            f"{report.hit_rate:.0%}",
            f"{report.imbalance:.2f}x",
            *([f"{report.handed_off:.0%}"] if any_handed_off else []),
            *([f"{report.restored_rate:.0%}"] if any_restored else []),
        )
    if has_slow:
        shares = (
            f"{row.traffic}, {row.report.policy}: " + " ".join(f"{share:.0%}" for share in row.report.first_engine)
            for row in rows
        )
        heading = f"Prompts of the slow engine over an equal share, in each {SHARE_S:g} s"
        shown.caption, shown.caption_justify = "\n".join([heading, *shares]), "left"
    return shown


def _check(fleets: SimulatedFleets, policies: Collection[str]) -> None:
    if bool(fleets.num_prefill) != bool(fleets.num_decode):
        raise InvalidSimulation("prefill and decode engines need each other: give both numbers, or unified engines")
    if not fleets.num_unified and not fleets.num_prefill:
        raise InvalidSimulation("no engine was asked for")
    slow = fleets.slow
    if not slow.begins_s < slow.ends_s:
        raise InvalidSimulation(
            f"an engine is slow from {slow.begins_s:g} to {slow.ends_s:g} s, which never comes: give a later end"
        )
    if slow.times == NEVER_SLOW.times and slow != NEVER_SLOW:
        raise InvalidSimulation("the time in which an engine is slow changes nothing: give by how much (slow_times)")
    if unknown := sorted(set(policies) - _policies(fleets).keys()):
        of_tiers = f"; with tiers {', '.join(OF_TIERS)}" if not fleets.num_tier_blocks else ""
        raise InvalidSimulation(f"{unknown[0]!r} is not a policy; choose from {', '.join(_policies(fleets))}{of_tiers}")


def _policies(fleets: SimulatedFleets) -> Mapping[str, PolicyMaker]:
    return POLICIES | OF_TIERS if fleets.num_tier_blocks else POLICIES


def _traffic(fleets: SimulatedFleets, shape: TrafficShape, trace_file: Path | None) -> dict[str, list[RequestArrival]]:
    if trace_file is not None:
        return {trace_file.name: trace(trace_file)}
    num_engines = fleets.num_unified or fleets.num_prefill
    conversations = CONVERSATIONS_PER_ENGINE * num_engines
    return {
        "shared": shared(shape, num_systems=num_engines, num_conversations=conversations),
        "unshared": unshared(shape),
    }
