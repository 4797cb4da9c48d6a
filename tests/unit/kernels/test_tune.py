"""Tuning keeps the fastest options that fit, and writes what `tuned.config` reads."""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.kernels import tune, tuned

CPU = torch.device("cpu")
errors = pytest.importorskip("triton").runtime.errors


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Times of runs by their BLOCK, which replace measurements."""
    table: dict[int, float] = {}
    monkeypatch.setattr(tune, "seconds_per_call", lambda run, device, measure_s=None: table[run()])
    return table


def run_with(options: tuned.Options) -> Callable[[], int]:
    def run() -> int:
        if options["BLOCK"] > 256:
            raise errors.OutOfResources(options["BLOCK"], 256, "shared memory")
        return options["BLOCK"]

    return run


def problem(*blocks: int, rows: int = 1) -> tune.Problem:
    return tune.Problem({"rows": rows}, [{"BLOCK": block} for block in blocks], run_with)


def test_the_fastest_candidate_wins(seconds: dict[int, float]) -> None:
    seconds.update({32: 3.0, 64: 1.0, 128: 2.0})
    assert tune.best(problem(32, 64, 128), CPU) == {"BLOCK": 64}


def test_a_candidate_that_does_not_fit_is_left_out(seconds: dict[int, float]) -> None:
    seconds.update({32: 3.0, 512: 1.0})
    assert tune.best(problem(512, 32), CPU) == {"BLOCK": 32}


def test_candidates_are_compiled_ahead_before_the_first_of_them_runs(
    seconds: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds.update({32: 3.0, 64: 1.0})
    done: list[str] = []

    @contextlib.contextmanager
    def recording(submit: Callable[[Any], object]) -> Iterator[None]:
        done.append("recording")
        submit("a variant")
        yield

    class FakeCompiler:
        def submit(self, variant: Any) -> None:
            done.append(variant)

        def wait(self) -> None:
            done.append("compiled")

    def make_run(options: tuned.Options) -> Callable[[], int]:
        def run() -> int:
            done.append(f"run {options['BLOCK']}")
            return options["BLOCK"]

        return run

    monkeypatch.setattr(tune, "recording", recording)
    problem = tune.Problem({"rows": 1}, [{"BLOCK": 32}, {"BLOCK": 64}], make_run)
    assert tune.best(problem, CPU, FakeCompiler()) == {"BLOCK": 64}  # type: ignore[arg-type]
    assert done[:6] == ["recording", "a variant", "run 32", "run 64", "compiled", "run 32"]


def test_a_problem_without_a_fitting_candidate_is_named(seconds: dict[int, float]) -> None:
    with pytest.raises(ValueError, match=r"none of 1 candidates runs on this device at {'rows': 7}"):
        tune.best(problem(512, rows=7), CPU)


def test_config_reads_the_written_options(
    seconds: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds.update({32: 1.0, 64: 2.0})
    module = types.ModuleType("tuning")
    module.problems = lambda device: [problem(32, 64, rows=1), problem(64, rows=512)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "baton.kernels.linear.tuning", module)
    for owner in (tune, tuned):
        monkeypatch.setattr(owner, "device_name", lambda device: "NVIDIA_H200")
    path = tune.tune("linear", CPU, tmp_path)
    assert path.read_text().count("\n") == 4

    monkeypatch.setattr(tuned, "LIBRARY", tmp_path)
    tuned.forget()
    read = [tuned.config("linear", torch.device("cuda", 0), {"rows": rows}, {"BLOCK": 1}) for rows in (2, 300)]
    assert read == [{"BLOCK": 32}, {"BLOCK": 64}]
    tuned.forget()


def test_an_op_without_problems_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["rms_nrom"])
    assert "nothing to tune in rms_nrom" in capsys.readouterr().err


def test_some_shapes_are_measured_again_and_the_others_stay(
    seconds: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds.update({32: 1.0, 64: 2.0})
    module = types.ModuleType("tuning")
    module.problems = lambda device: [problem(32, 64, rows=rows) for rows in (1, 8)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "baton.kernels.linear.tuning", module)
    monkeypatch.setattr(tune, "device_name", lambda device: "NVIDIA_H200")
    tune.tune("linear", CPU, tmp_path)
    seconds[32] = 3.0
    module.problems = lambda device: [problem(32, 64, rows=rows) for rows in (8, 9)]  # type: ignore[attr-defined]
    path = tune.tune("linear", CPU, tmp_path, only={"rows": "8"})
    found = [(entry["key"]["rows"], entry["config"]["BLOCK"]) for entry in json.loads(path.read_text())]
    assert found == [(1, 32), (8, 64)]
    with pytest.raises(ValueError, match=r"linear has no shape with \{'rows': '80'\}"):
        tune.tune("linear", CPU, tmp_path, only={"rows": "80"})
