"""Loads a model's weights in three steps.

methods   layers that the checkpoint has quantized get the weight method of its format
account   by names and shapes alone: every tensor of the checkpoint has exactly one slot, and every slot its tensor
stream    tensors are read and copied to their slots one at a time
"""

from __future__ import annotations

import fnmatch
import logging
import math
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from baton.kernels import fp8

from ..absent import FETCH_AGAIN
from ..hf_config.checkpoint import DTYPES, E4M3, Checkpoint, TensorEntry, some
from ..hf_config.errors import WeightsError
from ..hf_config.quantization import Quantization
from ..hf_config.text_part import text_tensors
from ..layers.base import Layer, Share, Slot, layers_of
from ..layers.experts import Experts
from ..layers.fp8 import Fp8Experts, Fp8Linear, plain_weight
from ..layers.linear import Linear
from . import Progress

if TYPE_CHECKING:
    from ..layers.decoder import CausalLM
    from ..layers.eagle3 import Eagle3Head

    Loadable = CausalLM | Eagle3Head


logger = logging.getLogger(__name__)


def load_weights(model: Loadable, *, device: torch.device | str = "cpu", progress: Progress | None = None) -> None:
    """Allocate the parameters on `device`, fill them as `model.config` says, and pack them for the kernels.

    Beside the model, at most one checkpoint tensor is in memory, or the rank's share of it if it is divided. FP8
    weights stay in 8 bits if the device has kernels for them, else they are dequantized. Raises `WeightsError`.
    """
    config = model.config
    device = torch.device(device)
    dtype: torch.dtype = getattr(torch, config.dtype)
    checkpoint, expanded = _choose_methods(model, device)
    if config.quantization is not None and not fp8.has_gpu_kernels(device):
        logger.info("FP8 weights are dequantized: there are no FP8 kernels for %s", device)
    if expanded:
        logger.warning(
            "the FP8 weights of %d layers are dequantized: no kernel takes their scales, or several layers or ranks "
            "would share a block of %d x %d values: %s",
            len(expanded),
            fp8.BLOCK,
            fp8.BLOCK,
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
    """Raise `WeightsError` if the account of `load_weights` would. Reads headers only, and allocates nothing."""
    checkpoint, _ = _choose_methods(model, torch.device("cpu"))
    if checkpoint is not None:
        _account_with_scales(model, {slot.name: slot for slot in model.slots()}, checkpoint)


def allocate_unfilled(model: Loadable, *, device: torch.device | str) -> None:
    """Do the same as `load_weights`, but leave parameters uninitialized: for steps that only launch kernels."""
    _choose_methods(model, torch.device(device))
    model.allocate(device, getattr(torch, model.config.dtype))
    model.finish()


def _choose_methods(model: Loadable, device: torch.device) -> tuple[Checkpoint | None, list[str]]:
    """Give layers the methods for their weights.

    Return the checkpoint (None for dummy weights), and the layers whose quantized weights are dequantized although the
    device has kernels.
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
    """Account for all tensors. Return the scales of the weights to dequantize, by the weights' names."""
    _warn_of_unread_head(model, checkpoint)
    quantization = model.config.quantization
    scales = _scales_to_multiply_with(slots, checkpoint, quantization)
    unread = () if quantization is None else quantization.unread
    account(slots, checkpoint, (*model.ignored_tensors, *unread, *(entry.name for entry in scales.values())))
    return scales


def _warn_of_unread_head(model: Loadable, checkpoint: Checkpoint) -> None:
    """Warn if the config ties the head to the embedding, but the checkpoint has another head."""
    embedding, head = (checkpoint.entries.get(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    if not model.config.tie_word_embeddings or embedding is None or head is None:
        return
    if not embedding.seems_equal(head):
        logger.warning(
            "%s: lm_head.weight differs from model.embed_tokens.weight, but is ignored, since config.json sets "
            "tie_word_embeddings to true. Set it to false there to use lm_head.weight",
            checkpoint.folder,
        )


def account(slots: Mapping[str, Slot], checkpoint: Checkpoint, ignored: tuple[str, ...]) -> None:
    """Raise `WeightsError` unless the checkpoint's tensors match the slots exactly. The error lists all differences.

    `ignored` are patterns of tensors that a checkpoint may contain in addition.
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
    """Return the scales of each FP8 weight that goes to a layer without FP8 kernels, by the weight's name.

    Raises `WeightsError` if such a weight has no scales.
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
    """Yield each slot that has a share on this rank, with its tensor or a part of it that contains the share.

    Weights that have `scales` are dequantized. They are read whole, since a share may cut blocks of scales.
    """
    with ExitStack() as stack:
        files = {scale.file for scale in scales.values()}
        scale_files: dict[Path, Any] = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}
        for file, entries in checkpoint.by_file():
            for slot, entry, tensor in _read_file(file, entries, slots, whole=scales):
                scale = scales.get(entry.name)
                if scale is not None:
                    scale_tensor = scale_files[scale.file].get_tensor(scale.name_in_file)
                    tensor = plain_weight(tensor, scale_tensor, in_blocks, dtype)
                yield slot, tensor


def _read_file(
    file: Path, entries: Sequence[TensorEntry], slots: Mapping[str, Slot], whole: Container[str]
) -> Iterator[tuple[Slot, TensorEntry, Tensor]]:
    """Yield the tensors of a file of which this rank has a share, those named in `whole` without cutting them."""
    with safe_open(file, framework="pt") as tensors:
        for entry in entries:
            slot = slots.get(entry.name)
            if slot is None or not slot.num_elements:
                continue
            index = () if entry.name in whole else slot.index(entry.shape)
            name = entry.name_in_file
            yield slot, entry, tensors.get_slice(name)[index] if index else tensors.get_tensor(name)


SPREAD = 0.02  # standard deviation, as models are usually initialized
_BANK_SIZE = 1_048_573  # prime, so that no matrix has equal rows


class DummyWeights:
    """Random weights. Each tensor is read from one cyclic bank of normal numbers, from an offset hashed from its name.

    So a rank can produce its share of a tensor alone, and the model is the same for any number of ranks.
    """

    def __init__(self, seed: int, device: torch.device | str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._bank = (torch.randn(_BANK_SIZE, generator=generator) * SPREAD).to(device, dtype)

    def tensor(self, slot: Slot) -> Tensor:
        """Return the slot's share (and perhaps more) of its tensor, around the parameter's typical value."""
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
    """Give quantized layers of `model` the method of their format, before memory is allocated.

    `is_quantized` is called with the names of linear layers in the checkpoint. Return the quantized layers that keep
    the plain method: merged layers of which only some are quantized, layers in which a block of scales would straddle
    parts or ranks, and experts without kernels.
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
    """Set the layer's method. Return false if it keeps the plain method although some of it is quantized."""
    method, parts = Fp8Linear(quantization), layer.parts_at(path)
    shares, quantized = list(parts.values()), [is_quantized(name) for name in parts]
    if not all(quantized) or not method.fits(layer.columns, shares):
        return not any(quantized)
    layer.use(method)
    return True
