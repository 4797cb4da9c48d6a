"""The tuner: measures the best options of each op on this machine's GPU, and writes them for `tuned.config`.

    python -m baton.kernels.tune [OP ...] [--only NAME=VALUE ...] [--out DIR]

An op is included if it has a module `tuning.py` with a function `problems(device) -> Iterable[Problem]`. Results go
into the file for this device and this version of Triton; what it has of other shapes stays.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track

from . import __name__ as library_name
from . import __path__ as library_path
from .compiler import Compiler, recording, start_compiler
from .roofline import seconds_per_call
from .tuned import LIBRARY, Entry, Key, Options, device_name, path_for

logger = logging.getLogger(__name__)

SCREEN_S = 0.005  # duration of a first measurement of each candidate; the best are measured for longer
FINALISTS = 4


@dataclass(frozen=True)
class Problem:
    """A shape to tune. `make_run(options)` returns a function that runs the op once; on a GPU, a graph captures it."""

    key: Key
    candidates: Sequence[Options]
    make_run: Callable[[Options], Callable[[], object]]


def tune(
    op: str,
    device: torch.device,
    root: Path = LIBRARY,
    compiler: Compiler | None = None,
    only: Mapping[str, str] | None = None,
) -> Path:
    """Measure an op's problems, or those with certain values in their keys, and return the file written under `root`.

    Raises `ValueError` if there are no such problems, and as `best` does.
    """
    wanted = dict(only or {})
    problems = [
        problem
        for problem in importlib.import_module(f"{library_name}.{op}.tuning").problems(device)
        if wanted.items() <= {name: str(value) for name, value in problem.key.items()}.items()
    ]
    if not problems:
        raise ValueError(f"{op} has no shape with {wanted}")
    measured = {
        _words(problem.key): Entry(problem.key, best(problem, device, compiler)) for problem in track(problems, op)
    }
    path = path_for(op, device_name(device), root)
    before = [Entry(**entry) for entry in json.loads(path.read_text())] if path.exists() else []
    entries = [measured.pop(_words(entry.key), entry) for entry in before] + list(measured.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json(entries))
    return path


def _words(key: Key) -> tuple[tuple[str, int | str], ...]:
    return tuple(sorted(key.items()))


def best(problem: Problem, device: torch.device, compiler: Compiler | None = None) -> Options:
    """Return the fastest candidate; `compiler` compiles them in parallel. Raises `ValueError` if none can run."""
    if compiler is not None:
        with recording(compiler.submit):
            list(_fitting(problem))
        compiler.wait()
    fitting = list(_fitting(problem))
    if not fitting:
        raise ValueError(f"none of {len(problem.candidates)} candidates runs on this device at {dict(problem.key)}")
    ranked = sorted(fitting, key=lambda options: seconds_per_call(problem.make_run(options), device, SCREEN_S))
    return min(ranked[:FINALISTS], key=lambda options: seconds_per_call(problem.make_run(options), device))


def _fitting(problem: Problem) -> Iterator[Options]:
    """Yield the candidates that can run: they compile, and fit in shared memory and registers."""
    from triton.runtime.errors import OutOfResources, PTXASError

    for options in problem.candidates:
        try:
            with torch.inference_mode():
                problem.make_run(options)()
        except (OutOfResources, PTXASError) as error:
            logger.info("%s does not fit: %s", options, str(error).partition("\n")[0])
        else:
            yield options


def as_json(entries: Iterable[Entry]) -> str:
    """Encode one entry per line, for readable diffs."""
    lines = (json.dumps({"key": dict(entry.key), "config": entry.config}) for entry in entries)
    return "[\n" + ",\n".join(f"  {line}" for line in lines) + "\n]\n"


def ops_with_tuning() -> list[str]:
    folders = [module.name for module in pkgutil.iter_modules(library_path) if module.ispkg]
    return [name for name in folders if importlib.util.find_spec(f"{library_name}.{name}.tuning") is not None]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m baton.kernels.tune", description=__doc__.partition("\n")[0])
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"of {', '.join(ops_with_tuning())}; by default all")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME=VALUE", help="shapes with these values in their keys"
    )
    parser.add_argument("--out", type=Path, default=LIBRARY, help="folder to write into instead of the library")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.ops) - set(ops_with_tuning()))
    if unknown:
        parser.error(f"nothing to tune in {', '.join(unknown)}: choose from {', '.join(ops_with_tuning())}")
    if words := [word for word in given.only if "=" not in word]:
        parser.error(f"--only {' '.join(words)}: give NAME=VALUE, such as num_experts=512")
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here to measure on")
    device = torch.device("cuda", torch.cuda.current_device())
    compiler = start_compiler()
    try:
        for op in given.ops or ops_with_tuning():
            print(tune(op, device, given.out, compiler, dict(word.split("=", 1) for word in given.only)))
    finally:
        if compiler is not None:
            compiler.close()


if __name__ == "__main__":
    main()
