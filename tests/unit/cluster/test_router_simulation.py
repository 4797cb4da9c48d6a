"""Routers compared in virtual time."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from baton.cluster.cached_blocks import CachedBlocks
from baton.cluster.cli.main import app
from baton.cluster.gateway.routing import router
from baton.cluster.simulation.router_policies import OF_TIERS, POLICIES, RememberedBlocks
from baton.cluster.simulation.router_simulation import (
    InvalidSimulation,
    RouterSimulation,
    SimulatedFleets,
    SimulationReport,
    compare,
)
from baton.cluster.simulation.traffic import InvalidTrace, RequestArrival, TrafficShape, shared, trace, unshared
from baton.cluster.simulation.virtual_engine import SlowSpell, Speed, VirtualTime
from baton.engine.core.messages import EngineOutput, FinishReason

UNIFIED = SimulatedFleets(num_unified=4, num_blocks=512)
DIVIDED = SimulatedFleets(num_prefill=2, num_decode=2, num_blocks=512)
TIERED = SimulatedFleets(num_unified=4, num_blocks=256, num_host_blocks=512, num_disk_blocks=4096)
TIERED_AND_DIVIDED = SimulatedFleets(num_prefill=2, num_decode=2, num_blocks=256, num_disk_blocks=4096)
SHAPE = TrafficShape(num_requests=80, rate_per_s=20, prompt_tokens=1024, output_tokens=8)


def run(
    fleets: SimulatedFleets, policy: str, arrivals: list[RequestArrival]
) -> tuple[SimulationReport, RouterSimulation]:
    replay = RouterSimulation(fleets, policy, Speed())
    return replay.run(arrivals), replay


def conversations() -> list[RequestArrival]:
    return shared(SHAPE, num_systems=4, num_conversations=16)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fleets", [UNIFIED, DIVIDED], ids=["unified", "divided"])
def test_every_request_is_served_to_its_last_token_and_every_block_is_freed(
    fleets: SimulatedFleets, policy: str
) -> None:
    arrivals = conversations()
    report, replay = run(fleets, policy, arrivals)
    assert report.num_requests == len(arrivals)
    stats = [engine.stats for engine in replay.engines]
    assert all(each.num_blocks_free == each.num_blocks for each in stats)
    assert sum(each.generation_tokens for each in stats) == sum(arrival.output_tokens for arrival in arrivals)
    assert all(not +gateway.outstanding for gateway in replay.gateways)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", POLICIES | OF_TIERS)
@pytest.mark.parametrize("fleets", [TIERED, TIERED_AND_DIVIDED], ids=["unified", "divided"])
def test_gateways_know_exactly_the_blocks_that_engines_have_in_pool_and_tiers(
    fleets: SimulatedFleets, policy: str
) -> None:
    arrivals = conversations()
    report, replay = run(fleets, policy, arrivals)
    assert report.num_requests == len(arrivals)
    assert report.restored_rate > 0
    for engine in replay.engines:
        assert engine.stats.num_blocks_free == engine.stats.num_blocks
        known, snapshot = engine.view(0).cached, CachedBlocks(fleets.num_blocks, fleets.num_tier_blocks)
        snapshot.apply(engine.block_log.snapshot())
        assert known.places == snapshot.places


def test_a_router_that_knows_the_tiers_has_more_hits_and_lower_latency() -> None:
    told, untold = (run(TIERED, policy, conversations())[0] for policy in ("exact", "exact-pools"))
    assert told.restored_rate > untold.restored_rate
    assert told.hit_rate > untold.hit_rate
    assert told.ttft_mean_ms < untold.ttft_mean_ms


@pytest.mark.parametrize(("tier", "rate"), [("host", "host_tokens_per_s"), ("disk", "disk_tokens_per_s")])
def test_restoring_a_prompt_takes_the_time_of_the_formula(tier: str, rate: str) -> None:
    speed, prompt, other = Speed(), [1] * 1008 + [2], [3] * 1008 + [4]
    fleets = SimulatedFleets(num_unified=1, num_blocks=64, **{f"num_{tier}_blocks": 200})
    arrivals = [RequestArrival(at_s, tokens, 1) for at_s, tokens in ((0.0, prompt), (1.0, other), (2.0, prompt))]
    report, replay = run(fleets, "exact", arrivals)
    assert report.restored_rate == pytest.approx(1008 / (3 * 1009))
    (*_, last) = replay.served.values()
    assert last.first_s - 2.0 == pytest.approx(1008 / getattr(speed, rate) + speed.step_s, rel=0.02)


@pytest.mark.parametrize("fleets", [UNIFIED, DIVIDED], ids=["unified", "divided"])
def test_the_same_replay_gives_the_same_figures(fleets: SimulatedFleets) -> None:
    assert run(fleets, "exact", conversations())[0] == run(fleets, "exact", conversations())[0]


def test_the_exact_index_has_more_hits_and_lower_latency_than_other_policies() -> None:
    reports = {policy: run(UNIFIED, policy, conversations())[0] for policy in POLICIES}
    exact = reports.pop("exact")
    assert all(exact.hit_rate > other.hit_rate for other in reports.values())
    assert all(exact.ttft_mean_ms < other.ttft_mean_ms for other in reports.values())


def test_unshared_prompts_have_no_hits() -> None:
    assert {run(UNIFIED, policy, unshared(SHAPE))[0].hit_rate for policy in POLICIES} == {0.0}


def test_a_lone_request_takes_the_time_of_the_formula() -> None:
    speed = Speed()
    report, _ = run(SimulatedFleets(num_unified=1), "exact", [RequestArrival(5.0, [1] * 4000, 3)])
    assert report.ttft_mean_ms == pytest.approx(1e3 * 4000 / speed.prefill_tokens_per_s)
    assert report.tpot_mean_ms == pytest.approx(1e3 * (speed.step_s + speed.row_s))
    divided, _ = run(SimulatedFleets(num_prefill=1, num_decode=1), "exact", [RequestArrival(5.0, [1] * 4000, 3)])
    assert divided.ttft_mean_ms == report.ttft_mean_ms
    transfer_s = speed.handoff_s + 4000 / speed.kv_tokens_per_s
    assert divided.tpot_mean_ms == pytest.approx(1e3 * (transfer_s + 2 * (speed.step_s + speed.row_s)) / 2)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "num_unified", "num_prefill"),
    [(SlowSpell(5.0, 30.0, 90.0), 4, 0), (SlowSpell(5.0, 30.0, 90.0), 0, 4)],
    ids=["unified", "divided"],
)
def test_an_engine_that_was_slow_for_a_minute_gets_its_share_again_within_two(
    slow: SlowSpell, num_unified: int, num_prefill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets = SimulatedFleets(num_unified, num_prefill, num_prefill, num_gateways=2, slow=slow)
    arrivals = unshared(TrafficShape(num_requests=1500, rate_per_s=6, prompt_tokens=1024, output_tokens=8))
    before, when_slow, *_, after = run(fleets, "exact", arrivals)[0].first_engine[:8]
    assert before > 0.7
    assert when_slow < 0.2
    assert after > 0.7
    monkeypatch.setattr(router, "ENGINE_TRIAL_SHARE", 0.0)
    assert run(fleets, "exact", arrivals)[0].first_engine[7] == 0


@pytest.mark.slow
def test_an_engine_that_stays_slow_gets_a_few_requests_a_minute() -> None:
    fleets = SimulatedFleets(num_unified=4, num_gateways=2, slow=SlowSpell(5.0))
    arrivals = unshared(TrafficShape(num_requests=1500, rate_per_s=6, prompt_tokens=1024, output_tokens=8))
    _, simulation = run(fleets, "exact", arrivals)
    tried = [each for each in simulation.served.values() if each.prefill_rank == 0 and each.arrival.at_s > 30]
    minutes = (arrivals[-1].at_s - 30) / 60
    assert 1 <= len(tried) <= 3 * minutes + 3
    computed_s = sum(len(each.arrival.prompt) / Speed().prefill_tokens_per_s for each in tried)
    lost_s = sum(each.first_s - each.arrival.at_s for each in tried) - computed_s
    assert lost_s <= 60 * minutes / 100


class ClosedLoop(RouterSimulation):
    """Two clients that each send the next request after the last answer. The times of steps vary at random."""

    def __init__(self, fleets: SimulatedFleets, prompts: list[list[int]], seed: int) -> None:
        super().__init__(fleets, "exact", Speed(step_s=0.01, prefill_tokens_per_s=1000.0, kv_tokens_per_s=310.0))
        self._prompts, rng = list(enumerate(prompts)), random.Random(seed)
        for engine in self.engines:
            engine.slow = SimpleNamespace(factor=lambda now_s: rng.uniform(1.0, 2.0))
        for _ in range(2):
            self._ask()
        self._time.run()

    def _ask(self) -> None:
        if self._prompts:
            index, prompt = self._prompts.pop(0)
            self._arrive(index, RequestArrival(self._time(), prompt, 32))

    def _on_output(self, output: EngineOutput) -> None:
        super()._on_output(output)
        if output.finish_reason not in (None, FinishReason.HANDOFF):
            self._time.after(0.005, self._ask)

    @property
    def latencies_s(self) -> list[float]:
        return sorted(each.last_s - each.arrival.at_s for each in self.served.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_behind_a_slow_link_two_engines_serve_two_clients_as_unified_ones_do(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(32_000) for _ in range(rng.choice((400, 1500)))] for _ in range(60)]
    unified, divided = (
        ClosedLoop(SimulatedFleets(*counts, num_gateways=1), prompts, seed) for counts in ((2, 0, 0), (0, 1, 1))
    )
    assert divided.latencies_s == pytest.approx(unified.latencies_s)
    assert not any(each.handed_off for each in divided.served.values())


def test_virtual_time_runs_calls_by_time_and_then_in_order_of_scheduling() -> None:
    time, seen = VirtualTime(), []
    for name, delay_s in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        time.after(delay_s, lambda name=name: seen.append((name, time())))
    time.run()
    assert seen == [("a", 1.0), ("b", 2.0), ("c", 2.0)]


def test_remembered_blocks_evict_the_ends_of_old_prompts_first() -> None:
    memory = RememberedBlocks(6)
    memory.remember([1, 2, 3, 4])
    memory.remember([5, 6, 7, 8])
    assert memory.count_prefix([5, 6, 7, 8]) == 4
    assert memory.count_prefix([1, 2, 3, 4]) == 2


def test_requests_of_a_trace_are_sorted_by_time(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 2000, "input_length": 600, "output_length": 2, "hash_ids": [1, 3]},
        {"timestamp": 1000, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2], "more": "x"},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second = trace(file)
    assert (first.at_s, second.at_s) == (1.0, 2.0)
    assert (len(first.prompt), len(second.prompt)) == (1024, 600)
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:600] != second.prompt[512:]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 1: .*timestamp"),
        ("nonsense", "line 1: "),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "513 with 1 hash ids"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 0, "hash_ids": [1]}', "output_length 0"),
    ],
)
def test_the_error_of_an_invalid_line_names_it(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(line)
    with pytest.raises(InvalidTrace, match=message):
        trace(file)


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace, match="cannot be read"):
        trace(tmp_path / "gone.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InvalidTrace, match="holds no requests"):
        trace(tmp_path / "empty.jsonl")


@pytest.mark.parametrize(
    ("fleets", "policies", "message"),
    [
        (SimulatedFleets(num_prefill=1), [], "need each other"),
        (SimulatedFleets(), [], "no engine"),
        (
            UNIFIED,
            ["guess"],
            "'guess' is not a policy; choose from round-robin, power-of-two, approximate, exact; with tiers",
        ),
        (UNIFIED, ["exact-pools"], "'exact-pools' is not a policy; choose from .*; with tiers exact-pools"),
        (TIERED, ["guess"], "'guess' is not a policy; choose from .*, exact, exact-pools$"),
        (SimulatedFleets(num_unified=1, num_blocks=4), [], "do not fit into 4 blocks"),
        (
            dataclasses.replace(UNIFIED, slow=SlowSpell(2.0, 10.0, 5.0)),
            [],
            "from 10 to 5 s, which never comes: give a later end",
        ),
        (dataclasses.replace(UNIFIED, slow=SlowSpell(begins_s=10.0)), [], "changes nothing: give by how much"),
    ],
)
def test_impossible_replays_are_refused(fleets: SimulatedFleets, policies: list[str], message: str) -> None:
    with pytest.raises(InvalidSimulation, match=message):
        compare(fleets, SHAPE, None, policies)


def test_the_command_shows_a_table_and_writes_the_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--num-prompts", "20", "--input-len", "64", "--output-len", "4", "--policy", "exact", "--unified", "2"]
    result = CliRunner().invoke(app, ["bench", "router", *arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "exact" in result.output
    rows = json.loads(file.read_text())
    assert [(row["traffic"], row["report"]["policy"]) for row in rows] == [("shared", "exact"), ("unshared", "exact")]
    tiers = ["--num-blocks", "128", "--host-blocks", "256", "--disk-blocks", "512", "--unified", "1"]
    traffic = ["--num-prompts", "30", "--input-len", "512", "--output-len", "4"]
    result = CliRunner().invoke(app, ["bench", "router", *tiers, *traffic], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "exact-pools" in result.output
    assert "restored" in result.output
    refused = CliRunner().invoke(app, ["bench", "router", "--prefill", "2"])
    assert refused.exit_code != 0
    assert "need each other" in refused.output


@pytest.mark.slow
def test_a_replay_loads_no_torch() -> None:
    program = "import sys, baton.cluster.simulation.router_simulation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("num_gateways", [1, 8])
def test_a_hot_prefix_does_not_overload_one_engine_with_any_number_of_gateways(num_gateways: int) -> None:
    """The engine that has the prefix cached is best until its queue costs more than a prefill elsewhere."""
    tail, prefix = random.Random(5), list(range(4096))
    arrivals = [RequestArrival(0.0, [*prefix, 1], 2)]  # one engine computes the prefix first
    for index in range(400):
        at_s = arrivals[-1].at_s + tail.expovariate(300) + (index == 0)
        arrivals.append(RequestArrival(at_s, [*prefix, *tail.choices(range(30_000), k=64)], 64))
    report, replay = run(SimulatedFleets(num_unified=8, num_gateways=num_gateways), "exact", arrivals)
    answered = [engine.stats.generation_tokens for engine in replay.engines]
    assert max(answered) < 2 * sum(answered) / len(answered)
    assert report.hit_rate > 0.9, "each engine should compute the prefix about once"


def test_no_figure_of_the_table_is_cut() -> None:
    words = ["bench", "router", "--num-prompts", "20", "--unified", "2", "--policy", "exact"]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert "│ shared" in done.stdout
    assert "…" not in done.stdout
