"""Tuned launch options (block sizes, warps and the like): the best ones by measurements on a device.

    options = tuned.config("linear", x.device, {"rows": 64, "columns": 4096, "depth": 1024}, default=OPTIONS)
    kernel[grid](..., **options)

`kernels/<op>/tuned/<DEVICE>.triton-<major>.<minor>.json` is a list of entries, a key and the best options at that key,
written by `baton.kernels.tune`. `config` returns the options of the nearest entry: among those whose strings equal the
key's, the one whose numbers differ by the smallest factors. So a property on which correctness depends (a head size
that a block must cover) is a string in the key; one that only affects speed (a number of rows) is a number.

Nothing is measured at run time, and each op's file is read only once.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).parent

Key = Mapping[str, int | str]
Options = dict[str, int]


@dataclass(frozen=True)
class Entry:
    """The best options at one key."""

    key: Key
    config: Options


def config(op: str, device: torch.device, key: Key, default: Options) -> Options:
    """Return the options for `op` at `key`: the nearest tuned ones, else `default`, which is also used on any CPU.

    Raises `ValueError` if a file has other option names than `default`: it belongs to another kernel.
    """
    memo = (op, device, *key.items())
    found = _chosen.get(memo)
    if found is None:
        entry = nearest(known(op, device), key)
        found = _chosen[memo] = default if entry is None else entry.config
        if found.keys() != default.keys():
            raise ValueError(f"{op} is tuned for {sorted(found)} but takes {sorted(default)}: tune it again")
    return found


_chosen: dict[tuple[object, ...], Options] = {}


def forget() -> None:
    """Forget what was read: the files, or the device, are others from here on."""
    _chosen.clear()
    entries.cache_clear()


def known(op: str, device: torch.device) -> list[Entry]:
    """Return all measurements of an op: none on CPUs."""
    return entries(op, device_name(device)) if device.type == "cuda" else []


def nearest(known: list[Entry], key: Key) -> Entry | None:
    """Return the entry with the same names and words whose numbers are nearest by factor; None where no words agree."""
    words = {name: value for name, value in key.items() if isinstance(value, str)}
    alike = [entry for entry in known if entry.key.keys() == key.keys() and words.items() <= entry.key.items()]
    return min(alike, key=lambda entry: _distance(entry.key, key), default=None)


def _distance(one: Key, other: Key) -> float:
    """Return the sum of the logarithms of the factors between the numbers of two keys."""
    pairs = ((value, other[name]) for name, value in one.items())
    return sum(abs(math.log((a + 1) / (b + 1))) for a, b in pairs if isinstance(a, int) and isinstance(b, int))


@functools.cache
def entries(op: str, device: str) -> list[Entry]:
    """Return all measurements of an op on a device, with this version of Triton or the nearest one that there is."""
    version = triton_version()
    files = {_version_of(path): path for path in (LIBRARY / op / "tuned").glob(f"{device}.triton-*.json")}
    if not files:
        logger.info("%s is not tuned for %s: its default options are used", op, device)
        return []
    best = min(files, key=lambda measured: _releases_apart(measured, version))
    if best != version:
        logger.info("%s on %s: tuned with Triton %s, runs with %s", op, device, _dotted(best), _dotted(version))
    return [Entry(**entry) for entry in json.loads(files[best].read_text())]


def path_for(op: str, device: str, root: Path = LIBRARY) -> Path:
    """Return the file that belongs to this version of Triton."""
    return root / op / "tuned" / f"{device}.triton-{_dotted(triton_version())}.json"


@functools.cache
def device_name(device: torch.device) -> str:
    """Return a device's name as file names have it: `NVIDIA_H200`."""
    return torch.cuda.get_device_name(device).replace(" ", "_").replace("/", "_")


@functools.cache
def triton_version() -> tuple[int, int]:
    major, minor, *_ = metadata.version("triton").split(".")
    return int(major), int(minor)


def _version_of(path: Path) -> tuple[int, int]:
    major, minor = path.name.removesuffix(".json").rpartition(".triton-")[2].split(".")
    return int(major), int(minor)


def _releases_apart(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return abs(one[0] - other[0]), abs(one[1] - other[1])


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
