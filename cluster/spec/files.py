"""Where applications are written down, and where their models are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic
import yaml

from .application import FleetSpec
from .strict import InvalidSpec

CHECKOUT = Path(__file__).resolve().parents[2]


def load_spec(args: Mapping[str, Any], *, needs_model: bool = True) -> FleetSpec:
    """The application that these arguments describe; its `model` is an absolute path.

    Without `needs_model` the folder may be on other machines only. Raises `InvalidSpec`.
    """
    if not isinstance(args, Mapping):
        raise InvalidSpec(f"the application must be a mapping with `model` and `fleets`, not {type(args).__name__}")
    if isinstance(args.get("model"), str) and (needs_model or has_model(args["model"])):
        args = {**args, "model": str(find_model_folder(args["model"]))}
    try:
        return FleetSpec.model_validate(dict(args))
    except pydantic.ValidationError as error:
        raise InvalidSpec("\n".join(_line(problem) for problem in error.errors())) from None


def _line(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    what = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {what}" if where else what


def find_model_folder(model: str) -> Path:
    """A relative folder is looked up from the current folder, then from Baton's checkout (for the demo).

    Raises `InvalidSpec`.
    """
    candidates = _model_folders(model)
    for folder in candidates:
        if (folder / "config.json").is_file():
            return folder
    looked_at = " and ".join(str(folder) for folder in candidates)
    raise InvalidSpec(
        f"model: {model!r} is no model folder: there is no config.json in {looked_at}. Give one that has it; for"
        " `baton plan` that file is enough (--model FOLDER, as those in configs/models)"
    )


def has_model(model: str) -> bool:
    """Whether the folder is on this machine."""
    return any((folder / "config.json").is_file() for folder in _model_folders(model))


def _model_folders(model: str) -> list[Path]:
    here = [Path(model).expanduser().absolute()]
    return here if os.path.isabs(model) else [*here, CHECKOUT / model]


def specs_in_file(path: Path, *, model: str | None = None, needs_model: bool = True) -> dict[str, FleetSpec]:
    """The applications of a Serve config file by name, or the one of a file that holds only its arguments.

    `model` takes the place of theirs; see `load_spec` for `needs_model`. Raises `InvalidSpec`.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise InvalidSpec(f"{path}: {error}") from None
    if not isinstance(content, Mapping):
        raise InvalidSpec(f"{path}: must hold a mapping")
    if "applications" not in content:
        applications = {"baton": content}
    else:
        applications = {str(app.get("name", "default")): app.get("args") or {} for app in content["applications"]}
    own = {} if model is None else {"model": model}
    return {name: load_spec({**args, **own}, needs_model=needs_model) for name, args in applications.items()}
