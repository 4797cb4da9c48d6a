"""All policies on all traffic: `baton bench router`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.progress import track
from rich.table import Table

from baton.engine.core.layout import BLOCK_SIZE

from .engines import Speed
from .policies import OF_TIERS, POLICIES, PolicyMaker
from .replay import Fleets, Replay, Report
from .traffic import Arrival, Shape, shared, trace, unshared

CONVERSATIONS_PER_ENGINE = 8


class InvalidReplay(ValueError):
    """What was asked for cannot be replayed."""


class Row(msgspec.Struct, frozen=True):
    traffic: str
    report: Report


def compare(fleets: Fleets, shape: Shape, trace_file: Path | None, policies: Collection[str]) -> list[Row]:
    """Raises `InvalidReplay` and `InvalidTrace`. Shows its progress."""
    _check(fleets, policies)
    traffic = _traffic(fleets, shape, trace_file)
    for name, arrivals in traffic.items():
        longest = max((len(arrival.prompt) + arrival.output_tokens for arrival in arrivals), default=0)
        if longest > fleets.num_blocks * BLOCK_SIZE:
            raise InvalidReplay(f"{name}: {longest} tokens do not fit into {fleets.num_blocks} blocks of {BLOCK_SIZE}")
    chosen = policies or _policies(fleets)
    pairs = [(name, policy) for name in traffic for policy in chosen]
    return [
        Row(name, Replay(fleets, policy, Speed()).run(traffic[name]))
        for name, policy in track(pairs, description="replaying", transient=True)
    ]


def table(rows: Sequence[Row]) -> Table:
    """Columns of what there are none of are left out: restored tokens."""
    columns = ["traffic", "policy", "TTFT mean", "p50", "p99 ms", "TPOT mean", "p99 ms", "hits", "busiest"]
    any_restored = any(row.report.restored_rate for row in rows)
    shown = Table(*columns, *(["restored"] if any_restored else []))
    for row in rows:
        report = row.report
        shown.add_row(
            row.traffic,
            report.policy,
            *(f"{value:.0f}" for value in (report.ttft_mean_ms, report.ttft_p50_ms, report.ttft_p99_ms)),
            *(f"{value:.1f}" for value in (report.tpot_mean_ms, report.tpot_p99_ms)),
            f"{report.hit_rate:.0%}",
            f"{report.imbalance:.2f}x",
            *([f"{report.restored_rate:.0%}"] if any_restored else []),
        )
    return shown


def _check(fleets: Fleets, policies: Collection[str]) -> None:
    if bool(fleets.num_prefill) != bool(fleets.num_decode):
        raise InvalidReplay("prefill and decode engines need each other: give both numbers, or unified engines")
    if not fleets.num_unified and not fleets.num_prefill:
        raise InvalidReplay("no engine was asked for")
    if unknown := sorted(set(policies) - _policies(fleets).keys()):
        of_tiers = f"; with tiers {', '.join(OF_TIERS)}" if not fleets.num_tier_blocks else ""
        raise InvalidReplay(f"{unknown[0]!r} is no policy: there are {', '.join(_policies(fleets))}{of_tiers}")


def _policies(fleets: Fleets) -> Mapping[str, PolicyMaker]:
    return POLICIES | OF_TIERS if fleets.num_tier_blocks else POLICIES


def _traffic(fleets: Fleets, shape: Shape, trace_file: Path | None) -> dict[str, list[Arrival]]:
    if trace_file is not None:
        return {trace_file.name: trace(trace_file)}
    num_engines = fleets.num_unified or fleets.num_prefill
    conversations = CONVERSATIONS_PER_ENGINE * num_engines
    return {
        "shared": shared(shape, num_systems=num_engines, num_conversations=conversations),
        "unshared": unshared(shape),
    }
