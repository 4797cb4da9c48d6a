"""`baton serve` without a model names some that fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cluster.cli import known_models
from baton.cluster.cli.known_models import GB, KNOWN_MODELS, Device, fitting, no_model
from baton.engine.config import EngineConfig
from baton.engine.models import load_config
from baton.engine.startup.weight_counts import weights_of_rank

from ...helpers.baton_command import run_baton

SHAPES = Path(__file__).parents[3] / "configs/models"


@pytest.mark.parametrize(
    ("device", "names"),
    [
        (Device("H100", 80 * GB, is_gpu=True), ["Qwen3-4B", "Qwen3-8B", "Qwen3-14B"]),
        (Device("L4", 24 * GB, is_gpu=True), ["Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B"]),
        (Device("CPU", 16 * GB, is_gpu=False), ["Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B"]),
        (Device("CPU", 1 * GB, is_gpu=False), []),
    ],
)
def test_a_device_is_offered_the_models_that_fit(device: Device, names: list[str]) -> None:
    assert [model.name for model in fitting(device)] == [f"Qwen/{name}" for name in names]
    error = no_model(device)
    assert all(f"baton serve Qwen/{name} " in error for name in names)
    assert ("too small" in error) == (not names)


@pytest.mark.parametrize("shape", ["qwen3-8b", "qwen3-32b"])
def test_sizes_are_those_of_the_models_shapes(shape: str) -> None:
    (known,) = [model for model in KNOWN_MODELS if model.name.lower() == f"qwen/{shape}"]
    model = load_config(SHAPES / shape, load_format="dummy")
    config = EngineConfig(model=str(SHAPES / shape))
    assert weights_of_rank(model, config).num_bytes(model, has_fp8=True) == pytest.approx(known.num_bytes, rel=0.01)


def test_serve_without_a_model_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_models, "find_device", lambda: Device("NVIDIA L4", 24 * GB, is_gpu=True))
    done = run_baton("serve")
    assert done.returncode == 2
    assert "no model: give a name of the Hub" in done.stderr
    assert "NVIDIA L4 with 24 GB" in done.stderr
    assert "baton serve Qwen/Qwen3-8B" in done.stderr


def test_the_device_of_this_machine_is_found() -> None:
    assert known_models.find_device().memory_bytes > GB
