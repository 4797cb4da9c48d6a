"""What can be known of a model's files without reading a weight: they are there, whole, and fit its config.json."""

from __future__ import annotations

from baton.cluster.spec import FleetSpec, InvalidSpec
from baton.engine.hf_config.model_config import ModelConfig, ModelError
from baton.engine.models import check_weights
from baton.engine.text import TextError, Tokenizer


def check_model_files(spec: FleetSpec) -> None:
    """Accounts for every tensor by the headers of the model's files, as each engine does when it loads them, and reads
    the tokenizer. Loads torch, unless all weights are dummies.

    Raises `InvalidSpec` with one line a problem.
    """
    problems = []
    try:
        if needs_weights(spec):
            check_weights(ModelConfig.from_folder(spec.model))
    except ModelError as error:
        problems.append(str(error))
    try:
        Tokenizer.from_folder(spec.model)
    except TextError as error:
        problems.append(str(error))
    if problems:
        raise InvalidSpec("\n".join(f"model: {problem}" for problem in problems))


def needs_weights(spec: FleetSpec) -> bool:
    """Tells whether any fleet reads the model's weights, rather than draw random ones."""
    return any(spec.engine_config(role).load_format != "dummy" for role in spec.fleets.present)
