"""A model's folder: its files read, and nothing made of them yet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..absent import FETCH_AGAIN, absent_file
from ..models import families
from ..models.family import Family
from ..weights.checkpoint import Checkpoint
from .errors import InvalidModelConfig, UnsupportedArchitecture
from .keys import Keys


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    path: Path
    family: Family
    keys: Keys  # config.json, and what `transformers` assumes for what that leaves out
    generation: Mapping[str, Any]  # generation_config.json; empty where there is none
    checkpoint: Checkpoint | None  # None: its weights are not asked for

    @classmethod
    def open(cls, path: Path, *, with_weights: bool) -> ModelFolder:
        """Read the folder of a model. Raises `ModelError`."""
        raw = _read_json(path, "config.json")
        defaults = path / "generation_config.json"
        generation = _read_json(path, defaults.name) if defaults.is_file() or defaults.is_symlink() else {}
        family = _family(raw)
        return cls(
            path=path,
            family=family,
            keys=Keys("config.json", {**family.defaults, **raw}),
            generation=generation,
            checkpoint=Checkpoint.open(path) if with_weights else None,
        )

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of its weights."""
        return () if self.checkpoint is None else tuple(self.checkpoint.entries)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if path.is_symlink() and not path.exists():
        raise InvalidModelConfig(f"{folder} has no {absent_file(path)}: {FETCH_AGAIN}")
    if not path.is_file():
        raise InvalidModelConfig(
            f"{str(folder)!r} has no {name}: a model is given as a local folder with config.json and *.safetensors "
            "(`hf download NAME --local-dir FOLDER` fetches one)"
        )
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidModelConfig(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidModelConfig(f"{path} must hold an object, not {type(value).__name__}")
    return value


def _family(raw: Mapping[str, Any]) -> Family:
    given = raw.get("architectures") or []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise InvalidModelConfig(f"config.json: 'architectures' must be a list of names, not {given!r}")
    for name in given:
        if name in families():
            return families()[name]
    raise UnsupportedArchitecture(given, families())
