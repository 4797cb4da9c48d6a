"""Fills a model: first the account, from names and shapes alone, then the stream, one tensor at a time.

every tensor of the checkpoint is placed exactly once, every slot of the model is filled exactly once

Before both, the layers that the checkpoint has quantized are given the weight method for it.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from baton.engine.absent import FETCH_AGAIN
from baton.engine.hf_config.checkpoint import DTYPES, E4M3, Checkpoint, TensorEntry, some
from baton.engine.layers.base import Share, Slot
from baton.engine.layers.fp8 import plain_weight
from baton.kernels import fp8
from baton.kernels.fp8 import BLOCK

from ..hf_config.config_reader import text_tensors
from ..hf_config.errors import WeightsError
from ..hf_config.quantization import Quantization
from ..layers.base import Layer, layers_of
from ..layers.experts import Experts
from ..layers.fp8 import Fp8Experts, Fp8Linear
from ..layers.linear import Linear
from . import Progress

if TYPE_CHECKING:
    from baton.engine.layers.decoder import CausalLM
    from baton.engine.layers.eagle3 import Eagle3Head

    Loadable = CausalLM | Eagle3Head


logger = logging.getLogger(__name__)


def load_weights(model: Loadable, *, device: torch.device | str = "cpu", progress: Progress | None = None) -> None:
    """Allocate the parameters on `device`, fill them as `model.config` says, and pack them for the kernels.

    Holds no more than one tensor of the checkpoint beside the model, and of a divided one no more than a rank's share.
    Weights in 8 bits stay so where the device has kernels for them, and are multiplied out elsewhere. Raises
    `WeightsError`.
    """
    config = model.config
    device = torch.device(device)
    dtype: torch.dtype = getattr(torch, config.dtype)
    checkpoint, expanded = _choose_methods(model, device)
    if config.quantization is not None and not fp8.has_gpu_kernels(device):
        logger.info("weights in 8 bits are multiplied out: no kernels take them on %s", device)
    if expanded:
        logger.warning(
            "%d layers whose weights come in 8 bits are multiplied out, as no kernel takes their scales, or layers or "
            "ranks would share a block of %d x %d values: %s",
            len(expanded),
            BLOCK,
            BLOCK,
            some(expanded),
        )
    slots = {slot.name: slot for slot in model.slots()}
    stream: Iterator[tuple[Slot, Tensor]]
    if checkpoint is None:
        dummy = DummyWeights(config.seed, device, dtype)
        stream = ((slot, dummy.tensor(slot)) for slot in slots.values() if slot.num_elements)
    else:
        scales = _account_with_scales(model, slots, checkpoint)
        in_blocks = config.quantization is not None and config.quantization.in_blocks
        stream = _read(slots, checkpoint, scales, in_blocks, dtype)
    model.allocate(device, dtype)
    total = sum(slot.num_bytes(dtype) for slot in slots.values())
    done = 0
    for slot, tensor in stream:
        slot.place(tensor)
        done += slot.num_bytes(dtype)
        if progress is not None:
            progress(done, total)
    model.finish()


def check_weights(model: Loadable) -> None:
    """Raise `WeightsError` where `load_weights` would, before it reads a weight: from headers, without memory."""
    checkpoint, _ = _choose_methods(model, torch.device("cpu"))
    if checkpoint is not None:
        _account_with_scales(model, {slot.name: slot for slot in model.slots()}, checkpoint)


def allocate_unfilled(model: Loadable, *, device: torch.device | str) -> None:
    """Do what `load_weights` does, but leave memory as it was: for steps that only launch kernels."""
    _choose_methods(model, torch.device(device))
    model.allocate(device, getattr(torch, model.config.dtype))
    model.finish()


def _choose_methods(model: Loadable, device: torch.device) -> tuple[Checkpoint | None, list[str]]:
    """Give layers the methods of their weights.

    Returns the checkpoint that says which, None for dummy weights; and the layers whose quantized weights are
    multiplied out although the device has kernels.
    """
    config = model.config
    checkpoint = None if config.load_format == "dummy" else Checkpoint.open(config.folder)
    if checkpoint is not None and config.is_text_part:
        checkpoint = text_tensors(checkpoint)
    if config.quantization is None or not fp8.has_gpu_kernels(device):
        return checkpoint, []
    covered = config.quantization.covers if checkpoint is None else checkpoint.has_8_bit_weight
    return checkpoint, use_quantized_methods(model, config.quantization, covered)


def _account_with_scales(model: Loadable, slots: Mapping[str, Slot], checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Account for all tensors. Returns the scales that weights are to be multiplied with, by the weights' names."""
    _warn_of_unread_head(model, checkpoint)
    quantization = model.config.quantization
    scales = _scales_to_multiply_with(slots, checkpoint, quantization)
    unread = () if quantization is None else quantization.unread
    account(slots, checkpoint, (*model.ignored_tensors, *unread, *(entry.name for entry in scales.values())))
    return scales


def _warn_of_unread_head(model: Loadable, checkpoint: Checkpoint) -> None:
    """Warn where the config ties the head to the embedding, but the checkpoint brings another one."""
    embedding, head = (checkpoint.entries.get(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    if not model.config.tie_word_embeddings or embedding is None or head is None:
        return
    if not embedding.seems_equal(head):
        logger.warning(
            "%s: lm_head.weight is not model.embed_tokens.weight, but goes unread: config.json says "
            "tie_word_embeddings. Set it to false there if the checkpoint's own head is meant",
            checkpoint.folder,
        )


def account(slots: Mapping[str, Slot], checkpoint: Checkpoint, ignored: tuple[str, ...]) -> None:
    """Raise `WeightsError`, naming all that is wrong, unless the checkpoint's tensors are exactly the slots.

    `ignored` are patterns of names that a checkpoint may hold beside them.
    """
    entries = checkpoint.entries
    missing = [checkpoint.expected_in(name) for name in slots if name not in entries]
    unknown = [name for name in entries if name not in slots and not any(fnmatch.fnmatch(name, p) for p in ignored)]
    misshaped = [
        f"{name} {list(entries[name].shape)} instead of {list(slot.shape)}"
        for name, slot in slots.items()
        if name in entries and not slot.accepts(entries[name].shape)
    ]
    mistyped = [
        f"{name} {entries[name].dtype} instead of {', '.join(slot.stored_as or DTYPES)}"
        for name, slot in slots.items()
        if name in entries and entries[name].dtype not in (slot.stored_as or (*DTYPES, E4M3))
    ]
    found = {
        "missing": missing,
        "not part of the model": sorted(unknown),
        "of another shape": misshaped,
        "of another type": mistyped,
    }
    problems = [f"{len(names)} {what}: {some(names)}" for what, names in found.items() if names]
    if problems:
        advice = f"; {FETCH_AGAIN}" if len(problems) == 1 and missing else ""
        raise WeightsError(f"{checkpoint.folder}: the tensors do not fit config.json. " + "; ".join(problems) + advice)


def _scales_to_multiply_with(
    slots: Mapping[str, Slot], checkpoint: Checkpoint, quantization: Quantization | None
) -> dict[str, TensorEntry]:
    """Return the scales of each weight that comes in 8 bits to a layer that takes none, by the weight's name.

    Raises `WeightsError` for a weight in 8 bits that no scale is known of.
    """
    found: dict[str, TensorEntry] = {}
    without: list[str] = []
    for name, slot in slots.items():
        entry = checkpoint.entries.get(name)
        if entry is None or entry.dtype != E4M3 or slot.takes_8_bits:
            continue
        scale = None if quantization is None else checkpoint.entries.get(quantization.scale_of(name))
        if scale is None:
            without.append(name)
        else:
            found[name] = scale
    if without:
        raise WeightsError(f"{checkpoint.folder}: {len(without)} tensors of {E4M3} without scales: {some(without)}")
    return found


def _read(
    slots: Mapping[str, Slot],
    checkpoint: Checkpoint,
    scales: Mapping[str, TensorEntry],
    in_blocks: bool,
    dtype: torch.dtype,
) -> Iterator[tuple[Slot, Tensor]]:
    with ExitStack() as stack:
        files = {entry.file for entry in scales.values()}
        scale_files: dict[Path, Any] = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}
        for file, entries in checkpoint.by_file():
            with safe_open(file, framework="pt") as tensors:
                for entry in entries:
                    slot = slots.get(entry.name)
                    if slot is None or not slot.num_elements:
                        continue
                    scale = scales.get(entry.name)
                    if scale is not None:
                        # Whole: a share of a weight may cut the blocks that its scales belong to.
                        data = tensors.get_tensor(entry.name_in_file)
                        scaled = scale_files[scale.file].get_tensor(scale.name_in_file)
                        yield slot, plain_weight(data, scaled, in_blocks, dtype)
                    elif index := slot.index(entry.shape):
                        yield slot, tensors.get_slice(entry.name_in_file)[index]
                    else:
                        yield slot, tensors.get_tensor(entry.name_in_file)


SPREAD = 0.02  # standard deviation, as models are initialized
_BANK_SIZE = 1_048_573  # prime, so that no matrix has equal rows


class DummyWeights:
    """Every tensor is a stretch of one bank of normal numbers, from a place that its name gives, round and round.

    So a share of a tensor is the same whatever the others are: a model is the same over any number of ranks.
    """

    def __init__(self, seed: int, device: torch.device | str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._bank = (torch.randn(_BANK_SIZE, generator=generator) * SPREAD).to(device, dtype)

    def tensor(self, slot: Slot) -> Tensor:
        """Return the part of a tensor of the slot's shape that has its share, around its parameter's typical value."""
        rows, *others = slot.shares
        held = rows.slice
        values = self._stretch(slot.name, Share(held.start, held.stop - held.start, rows.whole), others)
        return values + slot.parameter.typical if slot.parameter.typical else values

    def _stretch(self, name: str, rows: Share, others: Sequence[Share]) -> Tensor:
        width = math.prod(share.whole for share in others)
        size = rows.size * width
        start = (zlib.crc32(name.encode()) + rows.start * width) % _BANK_SIZE
        rounds = -(-(start + size) // _BANK_SIZE)
        values = self._bank.repeat(rounds)[start : start + size].view(rows.size, *(share.whole for share in others))
        return values[(slice(None), *(share.slice for share in others))]


def use_quantized_methods(model: Layer, quantization: Quantization, is_quantized: Callable[[str], bool]) -> list[str]:
    """Give the layers of `model` that the checkpoint has quantized the method for it, before anything is allocated.

    `is_quantized` tells by a linear layer's name in the checkpoint. Returns the layers that stay plain nevertheless:
    those merged of both kinds, those of which parts or ranks would share a block, and experts that there are no
    kernels for.
    """
    plain = [path for path, layer in layers_of(Linear, model) if not _quantize(path, layer, quantization, is_quantized)]
    method = Fp8Experts(quantization)
    for path, experts in layers_of(Experts, model):
        parts = experts.parts_at(path)
        if experts.stored == "each" and method.fits(experts.shape) and all(is_quantized(name) for name in parts):
            experts.use(method)
        elif any(is_quantized(name) for name in parts):
            plain.append(path)
    return plain


def _quantize(path: str, layer: Linear, quantization: Quantization, is_quantized: Callable[[str], bool]) -> bool:
    """Return false for a layer that stays plain although some of it is quantized."""
    method, parts = Fp8Linear(quantization), layer.parts_at(path)
    shares, quantized = list(parts.values()), [is_quantized(name) for name in parts]
    if not all(quantized) or not method.fits(layer.columns, shares):
        return not any(quantized)
    layer.use(method)
    return True
