"""Fills a model: first the account, from names and shapes alone, then the stream, one tensor at a time.

every tensor of the checkpoint is placed exactly once, every slot of the model is filled exactly once
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor

from baton.engine.layers.base import Slot
from baton.engine.models.errors import WeightsError

from .checkpoint import DTYPES, Checkpoint
from .dummy import DummyWeights
from .progress import Progress

if TYPE_CHECKING:
    from baton.engine.layers.decoder import CausalLM

_NAMED_IN_ERRORS = 8


def load_weights(model: CausalLM, *, device: torch.device | str = "cpu", progress: Progress | None = None) -> None:
    """Allocates the parameters on `device`, fills them as `model.config` says, and packs them for the kernels.

    Holds no more than one tensor of the checkpoint beside the model. Raises `WeightsError`.
    """
    config = model.config
    slots = {slot.name: slot for slot in model.slots()}
    dtype: torch.dtype = getattr(torch, config.dtype)
    stream: Iterator[tuple[Slot, Tensor]]
    if config.load_format == "dummy":
        dummy = DummyWeights(config.seed, device, dtype)
        stream = ((slot, dummy.tensor(slot)) for slot in slots.values())
    else:
        checkpoint = Checkpoint.open(config.folder)
        account(slots, checkpoint, model.ignored_tensors)
        stream = _read(slots, checkpoint)
    model.allocate(device, dtype)
    total = sum(slot.num_elements for slot in slots.values()) * dtype.itemsize
    done = 0
    for slot, tensor in stream:
        slot.place(tensor)
        done += slot.num_elements * dtype.itemsize
        if progress is not None:
            progress(done, total)
    model.finish()


def account(slots: Mapping[str, Slot], checkpoint: Checkpoint, ignored: tuple[str, ...]) -> None:
    """Raises `WeightsError`, naming all that is wrong, unless the checkpoint's tensors are exactly the slots.

    `ignored` are patterns of names that a checkpoint may hold beside them.
    """
    entries = checkpoint.entries
    missing = [name for name in slots if name not in entries]
    unknown = [name for name in entries if name not in slots and not any(fnmatch.fnmatch(name, p) for p in ignored)]
    misshaped = [
        f"{name} {list(entries[name].shape)} instead of {list(slot.shape)}"
        for name, slot in slots.items()
        if name in entries and entries[name].shape != slot.shape
    ]
    mistyped = [
        f"{name} {entries[name].dtype}" for name in slots if name in entries and entries[name].dtype not in DTYPES
    ]
    found = {
        "missing": missing,
        "not part of the model": sorted(unknown),
        "of another shape": misshaped,
        f"of a type other than {', '.join(DTYPES)}": mistyped,
    }
    problems = [f"{len(names)} {what}: {_some(names)}" for what, names in found.items() if names]
    if problems:
        raise WeightsError(f"{checkpoint.folder}: the tensors do not fit config.json. " + "; ".join(problems))


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMED_IN_ERRORS
    return ", ".join(names[:_NAMED_IN_ERRORS]) + (f" and {rest} more" if rest > 0 else "")


def _read(slots: Mapping[str, Slot], checkpoint: Checkpoint) -> Iterator[tuple[Slot, Tensor]]:
    for file, entries in checkpoint.by_file():
        with safe_open(file, framework="pt") as tensors:
            for entry in entries:
                if entry.name in slots:
                    yield slots[entry.name], tensors.get_tensor(entry.name)
