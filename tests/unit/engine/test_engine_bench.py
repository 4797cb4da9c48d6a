"""The benchmarks run, and their results have the keys that comparisons read. No figure is judged here."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.engine.core.requests import drafting
from baton.engine.offline import bench, bench_drafts

ARGS = {"dtype": "float32", "max_num_seqs": 8, "num_gpu_blocks_override": 64}


def test_throughput_counts_every_token(checkpoint: Path) -> None:
    result = bench.throughput(str(checkpoint), bench.RandomBatch(5, 20, 6), engine_args=ARGS)
    assert (result["num_requests"], result["total_num_tokens"]) == (5, 5 * 26)
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / result["elapsed_time"])
    assert result["requests_per_second"] == pytest.approx(5 / result["elapsed_time"])


def test_latency_reports_every_iteration(checkpoint: Path) -> None:
    batch = bench.RandomBatch(2, 32, 4)
    result = bench.latency(str(checkpoint), batch, num_iters_warmup=1, num_iters=3, engine_args=ARGS)
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]


def test_requests_that_would_be_cut_off_are_not_measured(checkpoint: Path) -> None:
    """The figures would count tokens that were never generated."""
    args = {**ARGS, "max_model_len": 64}
    too_long = [bench.RandomBatch(2, 33, 32)]
    message = "prompts of 33 tokens with answers of 32 are longer than max_model_len, 64"
    with pytest.raises(ValueError, match=message):
        bench.throughput(str(checkpoint), *too_long, engine_args=args)
    with pytest.raises(ValueError, match=message):
        bench.latency(str(checkpoint), *too_long, engine_args=args)
    with pytest.raises(ValueError, match=message):
        bench_drafts.drafts(str(checkpoint), too_long, num_drafts=3, acceptance=0.5, engine_args=args)


@pytest.mark.slow
def test_startup_runs_in_processes_of_its_own(checkpoint: Path) -> None:
    result = bench.startup(str(checkpoint), num_iters_cold=0, num_iters_warm=1, engine_args=ARGS)
    assert result["avg_warm_startup_time"] > sum(result["warm_startup_phases"].values()) > 0
    assert "avg_cold_startup_time" not in result


@pytest.mark.slow
def test_no_start_at_all_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="num_iters_cold and num_iters_warm are both 0"):
        bench.startup(str(checkpoint), num_iters_cold=0, num_iters_warm=0)


def test_a_start_is_refused_as_in_this_process(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^'.*' has no config\.json"):
        bench.startup(str(tmp_path), num_iters_cold=0, num_iters_warm=1)


def test_a_start_that_fails_says_why(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.sys, "executable", "/bin/false")
    with pytest.raises(bench.StartupFailed, match="exit code 1"):
        bench.startup(str(checkpoint), num_iters_cold=0, num_iters_warm=1)


def test_percentiles_interpolate() -> None:
    assert bench.percentiles([3.0, 1.0, 2.0]) == pytest.approx(
        {"10": 1.2, "25": 1.5, "50": 2.0, "75": 2.5, "90": 2.8, "99": 2.98}
    )


@pytest.mark.slow
@pytest.mark.parametrize(("acceptance", "fewest", "most"), [(0.0, 1.0, 1.0), (1.0, 3.0, 4.0)])
def test_of_drafts_the_given_share_is_accepted(
    checkpoint: Path, acceptance: float, fewest: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many drafts as allowed, whatever time a step takes on this machine.
    monkeypatch.setattr(drafting, "Drafting", partial(drafting.Drafting, adapts=False))
    batches = [bench.RandomBatch(1, 20, 30), bench.RandomBatch(3, 20, 30)]
    result = bench_drafts.drafts(
        str(checkpoint), batches, num_drafts=3, acceptance=acceptance, engine_args={**ARGS, "device": "cpu"}
    )
    assert [found["batch_size"] for found in result["batches"]] == [1, 3]
    for found in result["batches"]:
        assert fewest <= found["spec_decode_acceptance_length"] <= most
        assert found["speedup"] == pytest.approx(found["output_throughput"] / found["baseline_throughput"])


def test_a_drafter_of_the_engine_is_measured_as_it_is(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "Drafting", partial(drafting.Drafting, adapts=False))
    itself = {"model": str(checkpoint), "num_speculative_tokens": 2}
    args = {**ARGS, "device": "cpu", "speculative_config": itself}
    result = bench_drafts.drafts(
        str(checkpoint), [bench.RandomBatch(2, 20, 30)], num_drafts=3, acceptance=0.5, engine_args=args
    )
    assert result["speculative_config"] == itself
    (found,) = result["batches"]
    assert found["spec_decode_acceptance_length"] > 2.8


def test_the_engine_without_drafts_is_gone_before_the_one_with_drafts_starts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Any]] = []

    def engine_for(model: str, args: dict[str, Any]) -> Any:
        assert all(core() is None for core in alive), "its blocks would take the memory"
        llm = bench.engine_for(model, args)
        alive.append(weakref.ref(llm.engine.core))
        return llm

    monkeypatch.setattr(bench_drafts, "engine_for", engine_for)
    bench_drafts.drafts(
        str(checkpoint),
        [bench.RandomBatch(1, 20, 3)],
        num_drafts=1,
        acceptance=0.5,
        engine_args={**ARGS, "device": "cpu"},
    )
    assert len(alive) == 2


def test_an_edit_trace_expects_answers_that_differ_in_a_few_tokens(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "Drafting", partial(drafting.Drafting, adapts=False))
    result = bench_drafts.drafts(
        str(checkpoint),
        [bench.RandomBatch(2, 20, 60)],
        num_drafts=8,
        acceptance=0.0,
        edit_every=20,
        engine_args={**ARGS, "device": "cpu"},
    )
    assert (result["num_drafts"], result["edit_every"]) == (8, 20)
    (found,) = result["batches"]
    assert found["equal_answers"] == 1.0
    assert found["spec_decode_acceptance_length"] > 3
    for name in ("speedup", "speedup_per_cpu_second"):
        kind = name.removeprefix("speedup")
        speeds = found[f"output_throughput{kind}"], found[f"baseline_throughput{kind}"]
        assert found[name] == pytest.approx(speeds[0] / speeds[1])


def test_edits_are_another_token_one_less_and_one_more() -> None:
    answer = list(range(100, 160))
    text = bench_drafts.edited(answer, 20, vocab_size=100)
    assert (len(text), len(set(text) & set(answer))) == (60, 58), "two tokens are gone, and two are others"
    assert [token for token in text if token >= 100] == sorted(set(text) & set(answer))
    assert bench_drafts.edited(answer, 61, vocab_size=100) == answer


def test_an_engine_that_does_not_guess_takes_no_drafter(checkpoint: Path) -> None:
    with bench.engine_for(str(checkpoint), ARGS) as llm, pytest.raises(ValueError, match="speculative_config"):
        llm.engine.core.draft_with(bench_drafts.InformedDrafter(lambda _, prompt: prompt, 1.0, 256))
