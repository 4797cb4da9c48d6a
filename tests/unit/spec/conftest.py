"""A model folder that holds only the config."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)
