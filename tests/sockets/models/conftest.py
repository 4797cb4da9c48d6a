"""A server that speaks the Hub's API, and processes that fetch models from it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ...helpers.hub_server import HubServer, hub_server
from .hub_client import DEMO, Client


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a folder with the demo model, and with files that must not be fetched."""
    folder = tmp_path / "repository"
    shutil.copytree(DEMO, folder)
    (folder / "original").mkdir()
    for name in ("README.md", "pytorch_model.bin", "original/consolidated.safetensors", "consolidated.safetensors"):
        (folder / name).write_bytes(b"0" * 1000)
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[HubServer]:
    with hub_server(demo__model=repository) as server:
        yield server


@pytest.fixture
def client(hub: HubServer, tmp_path: Path) -> Client:
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    return Client(tmp_path / "cache/hub", own)
