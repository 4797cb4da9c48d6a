"""A config.json with changes, read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.models import load_config

from .published_configs import PLAIN


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ModelConfig]:
    """Writes a config.json of PLAIN with changes (None removes a key) and reads it."""

    def make(
        generation: dict[str, Any] | None = None, given: dict[str, Any] | None = None, **changes: Any
    ) -> ModelConfig:
        keys = {key: value for key, value in {**PLAIN, **changes}.items() if key not in changes or value is not None}
        (tmp_path / "config.json").write_text(json.dumps(keys))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_config(tmp_path, load_format="dummy", **(given or {}))

    return make
