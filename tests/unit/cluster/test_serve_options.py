"""Options of `baton serve` become settings of an application."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.cli.options import ServeOptions
from baton.cluster.cli.serve import application_spec, commands_for

MODEL = str(Path(__file__).parents[3] / "configs/demo/model")


@pytest.mark.parametrize(
    ("gpus", "cores", "options", "engine", "expected"),
    [
        (0, 64, {}, {}, 1),
        (1, 64, {}, {}, 2),
        (8, 8, {}, {}, 2),
        (1, 7, {}, {}, 1),
        (1, 64, {}, {"device": "cpu"}, 1),
        (1, 64, {"gateways": 1}, {}, 1),
        (0, 2, {"gateways": 3}, {}, 3),
        (1, 64, {"address": "auto"}, {}, 1),  # the machines of that cluster are unknown
    ],
)
def test_a_gpu_beside_many_cores_is_served_by_two_gateways(
    gpus: int,
    cores: int,
    options: dict[str, Any],
    engine: dict[str, Any],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def glob(folder: Path, pattern: str) -> Iterator[Path]:
        assert (str(folder), pattern) == ("/dev", "nvidia[0-9]*")
        return (folder / f"nvidia{index}" for index in range(gpus))

    monkeypatch.setattr(Path, "glob", glob)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    _, spec = application_spec(ServeOptions(model=MODEL, **options), engine)
    assert spec.gateway.replicas == expected


def test_suggested_commands_have_the_key_option_if_a_key_is_required() -> None:
    _, open_to_all = application_spec(ServeOptions(model=MODEL), {})
    _, keyed = application_spec(ServeOptions(model=MODEL, api_key=["secret"]), {})
    where = ("baton", "http://127.0.0.1:8000", "192.0.2.1:6379")
    assert commands_for(*where, open_to_all)[0] == "baton status --url http://127.0.0.1:8000"
    assert commands_for(*where, keyed)[0] == 'baton status --url http://127.0.0.1:8000 --api-key "$KEY"'
