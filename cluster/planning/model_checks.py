"""Checks of an application against its model's folder that read no weights: config.json, file headers, tokenizer."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from baton.cluster.contracts import Role
from baton.cluster.spec import FleetSpec, InvalidSpec
from baton.engine.config import InvalidEngineConfig
from baton.engine.hf_config.checkpoint import Checkpoint
from baton.engine.hf_config.errors import ModelError, ModelNotFetched
from baton.engine.hf_config.hub import Files
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.models import load_config
from baton.engine.startup.arenas import engine_caches
from baton.engine.startup.model_config import read_model_config

from .sizing import find_too_small_tiers

POLL_S = 0.05
NICENESS = 10  # of the check: Ray, which starts meanwhile, has only so long for it


def check_model(spec: FleetSpec) -> None:
    """Check each fleet against the model's config.json. Raises `InvalidSpec` with a line for each invalid fleet."""
    problems = []
    _fetch(spec, Files.TEXT)
    for role in spec.fleets.present:
        try:
            found = [*_too_small_tiers(spec, role, read_model(spec, role))]
        except (ModelError, InvalidEngineConfig) as error:
            found = [str(error)]
        problems += [f"{role}: {problem}" for problem in found]
    if problems:
        raise InvalidSpec("\n".join(dict.fromkeys(problems)))


def _too_small_tiers(spec: FleetSpec, role: Role, model: ModelConfig) -> Iterator[str]:
    """Describe tiers that cannot hold one block of each cache group, however the engine divides them."""
    if (tiers := spec.fleets.present[role].kv_tiers) is not None:
        groups = engine_caches(model).on_each_rank(spec.engine_config(role).tensor_parallel_size).groups
        yield from find_too_small_tiers(tiers, sum(group.blocks.block_bytes for group in groups), len(groups))


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
    folder = _fetch(spec, Files.ALL if with_weights else Files.TEXT)
    _refuse([*(_weights_problems(folder) if with_weights else []), *_text_problems(folder)])
    if with_weights:
        _check_draft_files(spec, folder)


def check_headers(spec: FleetSpec, *, with_weights: bool) -> Path:
    """Do the part of `check_model_files` that needs no torch, and return the folder: a `WeightsCheck` does the rest.

    Raises `InvalidSpec` with one line a problem.
    """
    folder = _fetch(spec, Files.ALL if with_weights else Files.TEXT)
    _refuse([*(_header_problems(folder) if with_weights else []), *_text_problems(folder)])
    if with_weights:
        _check_draft_files(spec, folder)
    return folder


class WeightsCheck:
    """The account of a folder's tensors in a process of its own, from the construction on, while this process goes on.

    It takes some seconds, and torch, which this process needs for nothing else. Leaving the context ends the process.
    """

    def __init__(self, folder: Path) -> None:
        # In a session of its own: Ctrl-C in a terminal is its parent's.
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with contextlib.suppress(ProcessLookupError):  # it may have ended already
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)

    def __enter__(self) -> WeightsCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with self._process:  # closes the pipe, and waits
            pass

    def wait(self, stop: threading.Event) -> None:
        """Wait for the end of the check, or until `stop` is set. Raises `InvalidSpec` as `check_model_files` does."""
        problem = None
        while problem is None:
            if stop.is_set():
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                problem, _ = self._process.communicate(timeout=POLL_S)
        _refuse([problem.strip()] if problem else [])
        if self._process.returncode != 0:
            raise RuntimeError(f"the process that checks the weights ended with exit code {self._process.returncode}")


def _check_draft_files(spec: FleetSpec, folder: Path) -> None:
    """Check that fleets find the draft layers in the model's `folder`, or their draft model in its own.

    A draft model that has only a name on the Hub may not be downloaded yet, and is left to the engines. Raises
    `InvalidSpec`.
    """
    problems = []
    for role in spec.fleets.present:
        config = spec.engine_config(role).model_copy(update={"model": str(folder)})
        speculation = config.speculative_config
        if speculation is None or config.load_format == "dummy":
            continue
        if speculation.method == "mtp" or (speculation.model is not None and Path(speculation.model).is_dir()):
            found = _problems_of(functools.partial(read_model_config, config), (ModelError, InvalidEngineConfig))
            problems += [f"{role}: {problem}" for problem in found]
    if problems:
        raise InvalidSpec("\n".join(problems))


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise InvalidSpec("\n".join(f"model: {problem}" for problem in problems))


def _text_problems(folder: Path) -> list[str]:
    from baton.engine.text import TextError, Tokenizer

    return _problems_of(lambda: Tokenizer.from_folder(folder), TextError)


def _header_problems(folder: Path) -> list[str]:
    return _problems_of(lambda: Checkpoint.open(folder), ModelError)


def _weights_problems(folder: Path) -> list[str]:
    from baton.engine.models import check_weights

    return _problems_of(lambda: check_weights(load_config(folder)), ModelError)


def _problems_of(check: Callable[[], object], kinds: type[Exception] | tuple[type[Exception], ...]) -> list[str]:
    """Return the message of the error with which a check ends; nothing if it passes."""
    try:
        check()
    except kinds as error:
        return [str(error)]
    return []


def _fetch(spec: FleetSpec, files: Files) -> Path:
    """Return the model's folder. Raises `InvalidSpec` for a name on the Hub that cannot be downloaded."""
    try:
        return spec.model_folder(files)
    except ModelNotFetched as error:
        raise InvalidSpec(f"model: {error}") from error


def needs_weights(spec: FleetSpec) -> bool:
    """Return whether any fleet reads the model's weights, rather than drawing random ones."""
    return any(spec.engine_config(role).load_format != "dummy" for role in spec.fleets.present)


if __name__ == "__main__":
    for problem in _weights_problems(Path(sys.argv[1])):
        print(problem)
