"""Fixtures that read a changed config.json, and that load a model and its counterpart in `transformers`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.models import load_config, load_model
from baton.kernels import fp8

from ...helpers.checkpoints import make_model, write_checkpoint
from .parity_pairs import VARIANTS, Pair
from .published_configs import PLAIN


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Return a function that makes (our model, the `transformers` model) of a variant, with equal weights."""

    @functools.cache
    def make(variant: str, dtype: str = "float32") -> Pair:
        architecture, keys = VARIANTS[variant]
        folder = write_checkpoint(tmp_path_factory.mktemp(variant), architecture, dtype=dtype, **keys)
        return load_model(load_config(folder)), make_model(architecture, dtype=dtype, **keys)

    return make


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ModelConfig]:
    """Return a function that writes PLAIN with changes (None removes a key) to config.json and reads it."""

    def make(
        generation: dict[str, Any] | None = None, given: dict[str, Any] | None = None, **changes: Any
    ) -> ModelConfig:
        keys = {key: value for key, value in {**PLAIN, **changes}.items() if key not in changes or value is not None}
        (tmp_path / "config.json").write_text(json.dumps(keys))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_config(tmp_path, load_format="dummy", **(given or {}))

    return make


@pytest.fixture
def keeps_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU keep FP8 weights as a GPU does; the reference then computes with them."""
    monkeypatch.setattr(fp8, "has_gpu_kernels", lambda device: True)
