"""Checks of an application against its model's folder that read no weights: config.json, file headers, tokenizer."""

from __future__ import annotations

from pathlib import Path

from baton.cluster.contracts import Role
from baton.cluster.spec import FleetSpec, InvalidSpec
from baton.engine.config import InvalidEngineConfig
from baton.engine.hf_config.errors import ModelError, ModelNotFetched
from baton.engine.hf_config.hub import Files
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.models import load_config
from baton.engine.startup.model_config import read_model_config


def check_model(spec: FleetSpec) -> None:
    """Check each fleet against the model's config.json. Raises `InvalidSpec` with a line for each invalid fleet."""
    problems = []
    _fetch(spec, Files.TEXT)
    for role in spec.fleets.present:
        try:
            read_model(spec, role)
        except (ModelError, InvalidEngineConfig) as error:
            problems.append(f"{role}: {error}")
    if problems:
        raise InvalidSpec("\n".join(dict.fromkeys(problems)))


def read_model(spec: FleetSpec, role: Role) -> ModelConfig:
    """Read the model's config as one fleet uses it, but no weights.

    Raises `ModelError` for a model that Baton cannot serve, and `InvalidEngineConfig` if the arguments do not fit it.
    """
    folder = str(spec.model_folder(Files.TEXT))
    config = spec.engine_config(role).model_copy(update={"model": folder, "load_format": "dummy"})
    return read_model_config(config)


def check_model_files(spec: FleetSpec, *, with_weights: bool) -> None:
    """Read the tokenizer. With weights, also download missing files, and check by the files' headers that every tensor
    is used, as each engine does when it loads them; that imports torch.

    Raises `InvalidSpec` with one line for each problem.
    """
    from baton.engine.models import check_weights
    from baton.engine.text import TextError, Tokenizer

    problems = []
    folder = _fetch(spec, Files.ALL if with_weights else Files.TEXT)
    try:
        if with_weights:
            check_weights(load_config(folder))
    except ModelError as error:
        problems.append(str(error))
    try:
        Tokenizer.from_folder(folder)
    except TextError as error:
        problems.append(str(error))
    if problems:
        raise InvalidSpec("\n".join(f"model: {problem}" for problem in problems))


def _fetch(spec: FleetSpec, files: Files) -> Path:
    """Return the model's folder. Raises `InvalidSpec` for a name on the Hub that cannot be downloaded."""
    try:
        return spec.model_folder(files)
    except ModelNotFetched as error:
        raise InvalidSpec(f"model: {error}") from error


def needs_weights(spec: FleetSpec) -> bool:
    """Return whether any fleet reads the model's weights, rather than drawing random ones."""
    return any(spec.engine_config(role).load_format != "dummy" for role in spec.fleets.present)
