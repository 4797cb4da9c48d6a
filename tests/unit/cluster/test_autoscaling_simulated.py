"""The autoscaler simulated in virtual time, and the command that compares it with fixed sizes."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from baton.cluster.cli.main import app
from baton.cluster.contracts import Bounds
from baton.cluster.gateway.routing.rates import CostRates
from baton.cluster.simulation.autoscaler_simulation import AutoscalerSimulation, ScalingOutcome, SimulatedHardware
from baton.cluster.simulation.fleet_sizing import Autoscaled, FixedSizes, Sizer
from baton.cluster.simulation.traffic import RequestArrival, TrafficShape, bursts, tides
from baton.cluster.simulation.virtual_engine import Speed

from .scaling_samples import PLAN, D, P

SPEED = Speed(step_s=0.02, row_s=0.0006, prefill_tokens_per_s=6000.0)
WORLD = SimulatedHardware(SPEED, CostRates(prefill_tokens_per_s=6000.0), 10.0, 2048, ttft_s=2.0, inter_token_s=0.05)
SLOW = msgspec.structs.replace(
    PLAN, ttft_s=2.0, fleets={P: Bounds(1, 4), D: Bounds(1, 4)}, target_utilization=0.7, look_back_period_s=20.0
)


def simulated(sizer: Sizer, arrivals: list[RequestArrival]) -> ScalingOutcome:
    return AutoscalerSimulation(WORLD, sizer).run(arrivals)


@pytest.mark.slow
def test_autoscaled_fleets_cost_less_than_the_largest_and_serve_better_than_the_mean_size() -> None:
    arrivals = tides(TrafficShape(500, 4.0, 1536, 32), period_s=120.0)
    scaled = simulated(Autoscaled(SLOW), arrivals)
    largest, mean = (simulated(FixedSizes({P: size, D: 1}), arrivals) for size in (4, 1))
    assert scaled.num_requests == largest.num_requests == 500
    assert scaled.gpu_seconds < 0.8 * largest.gpu_seconds
    assert scaled.ttft_attained > mean.ttft_attained + 0.2
    assert scaled.changes >= 3, "the fleets must grow and shrink"


@pytest.mark.slow
def test_a_steady_load_changes_nothing_once_it_is_served() -> None:
    arrivals = bursts(TrafficShape(300, 2.0, 1024, 32), every_s=1000.0, lasting_s=1.0, times=1.0)
    assert simulated(Autoscaled(SLOW), arrivals).changes <= 1


def test_an_application_without_engines_answers_its_first_request_when_they_have_started() -> None:
    plan = msgspec.structs.replace(SLOW, fleets={P: Bounds(0, 2), D: Bounds(0, 2)})
    outcome = simulated(Autoscaled(plan), [RequestArrival(30.0, [1] * 64, 4), RequestArrival(31.0, [2] * 64, 4)])
    assert outcome.num_requests == 2
    assert WORLD.start_s <= outcome.ttft_p50_s <= WORLD.start_s + 3.0
    assert outcome.gpu_seconds < 2 * 20.0, "only two groups may run, from the first request on"


@pytest.mark.slow
def test_the_same_simulation_gives_the_same_figures() -> None:
    arrivals = tides(TrafficShape(150, 4.0, 1024, 16), period_s=60.0)
    assert simulated(Autoscaled(SLOW), arrivals) == simulated(Autoscaled(SLOW), arrivals)


@pytest.mark.slow
def test_the_command_compares_and_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = ["--num-prompts", "40", "--input-len", "512", "--output-len", "8", "--json", str(file)]
    result = CliRunner().invoke(app, ["bench", "autoscale", *words])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    sizes = ["autoscaled", "ongoing requests", "fixed 2 + 2", "fixed 4 + 4"]
    assert [(row["traffic"], row["outcome"]["sizes"]) for row in rows] == [
        (traffic, name) for traffic in ("tides", "bursts") for name in sizes
    ]
    lines = [{"timestamp": 1e3 * at, "input_length": 600, "output_length": 4, "hash_ids": [at, 99]} for at in range(9)]
    trace = tmp_path / "recorded.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    recorded = CliRunner().invoke(app, ["bench", "autoscale", "--trace", str(trace), "--json", str(file)])
    assert recorded.exit_code == 0, recorded.output
    assert {(row["traffic"], row["outcome"]["num_requests"]) for row in json.loads(file.read_text())} == {
        ("recorded.jsonl", 9)
    }
    refused = CliRunner().invoke(app, ["bench", "autoscale", "--max-replicas", "1"])
    assert refused.exit_code != 0
    assert "give 2 or more" in refused.output
