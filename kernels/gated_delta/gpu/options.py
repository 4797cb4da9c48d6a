"""Launch options of the kernels: defaults, and the keys of tuned ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.kernels import tuned
from baton.kernels.launch import multiprocessors
from baton.kernels.tuned import Options

STEP: Options = {"VALUES": 32, "LANES": 0, "num_warps": 2}  # without LANES: `step_tokens`, which the interpreter runs
INTRA: Options = {"HEADS": 1, "SOLVE": 16, "num_warps": 4, "num_stages": 1}
INTRA_PER_DIM: Options = {"DIMS": 32, "SOLVE": 16, "num_warps": 4, "num_stages": 1}
SCAN: Options = {"VALUES": 32, "num_warps": 4, "num_stages": 2}
WIDE_SCAN: Options = {"VALUES": 128, "num_warps": 8, "num_stages": 2}  # if one program per head fills the device


@dataclass(frozen=True)
class Shape:
    """The sizes that options depend on."""

    num_heads: int
    group: int
    key_dim: int
    value_dim: int
    per_dim: bool

    @property
    def padded_key_dim(self) -> int:
        """The number of key dimensions of a program, a power of two."""
        return 1 << (self.key_dim - 1).bit_length()

    @property
    def words(self) -> dict[str, str]:
        """Return the part of a tuning key that must match exactly."""
        gates = "a dimension" if self.per_dim else "a head"
        return {"gates": gates, "key_dim": str(self.key_dim), "value_dim": str(self.value_dim)}


def step_key(shape: Shape, num_seqs: int) -> tuned.Key:
    return {"kernel": "step", **shape.words, "heads": shape.num_heads * num_seqs}


def intra_key(shape: Shape, num_tokens: int) -> tuned.Key:
    return {"kernel": "intra", **shape.words, "group": str(shape.group), "head_tokens": shape.num_heads * num_tokens}


def scan_key(shape: Shape, num_seqs: int, num_tokens: int) -> tuned.Key:
    """Return the key for a step's prompts: how many scans run in parallel, and how long they are."""
    heads, tokens = shape.num_heads * num_seqs, num_tokens // max(1, num_seqs)
    return {"kernel": "scan", **shape.words, "heads": heads, "tokens_per_seq": tokens}


def step_options(shape: Shape, num_seqs: int, device: torch.device) -> Options:
    return tuned.config("gated_delta", device, step_key(shape, num_seqs), narrowed(STEP, shape))


def intra_options(shape: Shape, num_tokens: int, device: torch.device) -> Options:
    default = {**INTRA_PER_DIM, "DIMS": min(INTRA_PER_DIM["DIMS"], shape.padded_key_dim)} if shape.per_dim else INTRA
    return tuned.config("gated_delta", device, intra_key(shape, num_tokens), default)


def scan_options(shape: Shape, num_seqs: int, num_tokens: int, device: torch.device) -> Options:
    fills_device = shape.num_heads * num_seqs >= multiprocessors(device)
    is_wide = fills_device and shape.value_dim % WIDE_SCAN["VALUES"] == 0
    default = narrowed(WIDE_SCAN if is_wide else SCAN, shape)
    return tuned.config("gated_delta", device, scan_key(shape, num_seqs, num_tokens), default)


def narrowed(options: Options, shape: Shape) -> Options:
    """Return the options, with VALUES reduced so that it divides the number of value dimensions."""
    return {**options, "VALUES": min(options["VALUES"], shape.value_dim & -shape.value_dim)}
