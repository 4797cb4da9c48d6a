"""The autoscaler, Serve's default policy and fixed fleets on the same load: `baton bench autoscale`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.progress import track
from rich.table import Table

from baton.cluster.contracts import Bounds, Role, ScalePlan
from baton.cluster.gateway.routing.rates import CostRates

from .autoscaler_simulation import AutoscalerSimulation, ScalingOutcome, SimulatedHardware
from .fleet_sizing import Autoscaled, FixedSizes, OngoingRequests, Sizer
from .traffic import RequestArrival, TrafficShape, bursts, tides, trace
from .virtual_engine import Speed

NUM_BLOCKS = 4096  # of each group
# An 8B model on one GPU of a small machine, in round numbers: slow enough that a few requests a second load it.
SPEED = Speed(step_s=0.02, row_s=0.0006, prefill_tokens_per_s=6000.0)
ONGOING = {Role.PREFILL: 2.0, Role.DECODE: 16.0}  # `target_ongoing_requests` that suit a steady load


class InvalidComparison(ValueError):
    """A comparison that cannot be simulated."""


@dataclass(frozen=True)
class ScalingCase:
    """The load and the targets on which all policies are compared."""

    shape: TrafficShape
    trace_file: Path | None
    most: int  # groups of a fleet at most
    start_s: float
    ttft_s: float
    inter_token_s: float
    downscale_delay_s: float

    def __post_init__(self) -> None:
        if self.most < 2:
            raise InvalidComparison(f"--max-replicas {self.most}: there is nothing to scale; give 2 or more")


class AutoscalerRow(msgspec.Struct, frozen=True):
    traffic: str
    outcome: ScalingOutcome


def compare(case: ScalingCase) -> list[AutoscalerRow]:
    """Run all simulations, showing the progress. Raises `InvalidTrace`."""
    world = SimulatedHardware(
        speed=SPEED,
        rates=CostRates(prefill_tokens_per_s=SPEED.prefill_tokens_per_s),
        start_s=case.start_s,
        num_blocks=NUM_BLOCKS,
        ttft_s=case.ttft_s,
        inter_token_s=case.inter_token_s,
    )
    traffic = _traffic(case)
    runs = [(name, index) for name in traffic for index in range(len(_sizers(case)))]
    return [
        AutoscalerRow(name, AutoscalerSimulation(world, _sizers(case)[index]).run(traffic[name]))
        for name, index in track(runs, description="simulating", transient=True)
    ]


def table(rows: Sequence[AutoscalerRow]) -> Table:
    shown = Table("traffic", "fleets", "GPU-seconds", "most", "changes", "TTFT met", "ITL met", "TTFT p50", "p99 s")
    for row in rows:
        each = row.outcome
        shown.add_row(
            row.traffic,
            each.sizes,
            f"{each.gpu_seconds:.0f}",
            str(each.most),
            str(each.changes),
            f"{each.ttft_attained:.1%}",
            f"{each.inter_token_attained:.1%}",
            f"{each.ttft_p50_s:.2f}",
            f"{each.ttft_p99_s:.2f}",
        )
    return shown


def _sizers(case: ScalingCase) -> list[Sizer]:
    """Make new sizers, since each remembers the samples that it has seen."""
    plan = ScalePlan(
        fleets={role: Bounds(1, case.most) for role in (Role.PREFILL, Role.DECODE)},
        ttft_s=case.ttft_s,
        inter_token_s=case.inter_token_s,
        percentile=0.9,
        target_utilization=0.7,
        look_back_period_s=30.0,
        upscale_delay_s=5.0,
        downscale_delay_s=case.downscale_delay_s,
        downscale_to_zero_delay_s=case.downscale_delay_s,
    )
    half, most = -(-case.most // 2), case.most
    return [
        Autoscaled(plan),
        OngoingRequests(plan, ONGOING),
        FixedSizes({Role.PREFILL: half, Role.DECODE: half}),
        FixedSizes({Role.PREFILL: most, Role.DECODE: most}),
    ]


def _traffic(case: ScalingCase) -> dict[str, list[RequestArrival]]:
    if case.trace_file is not None:
        return {case.trace_file.name: trace(case.trace_file)}
    return {
        "tides": tides(case.shape, period_s=600.0),
        "bursts": bursts(case.shape, every_s=300.0, lasting_s=60.0, times=4.0),
    }
