"""Launch options of the kernels: defaults, and the keys of tuned ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.kernels import tuned
from baton.kernels.tuned import Options

STEP: Options = {"VALUES": 32, "num_warps": 4}
SUMS: Options = {"HEADS": 16, "num_warps": 4}
SCAN: Options = {"VALUES": 64, "SEGMENTS": 1, "num_warps": 4, "num_stages": 2}
WIDE_STATE = 256  # dimensions of a state for which a program of 4 warps has too few registers for 64 rows


@dataclass(frozen=True)
class SSDShape:
    """The sizes that options depend on."""

    num_heads: int
    group: int
    head_dim: int
    state_dim: int

    @property
    def words(self) -> dict[str, str]:
        """Return the part of a tuning key that must match exactly."""
        return {"head_dim": str(self.head_dim), "state_dim": str(self.state_dim)}


def step_key(shape: SSDShape, num_seqs: int) -> tuned.Key:
    return {"kernel": "step", **shape.words, "heads": shape.num_heads * num_seqs}


def scan_key(shape: SSDShape, num_seqs: int, num_tokens: int) -> tuned.Key:
    """Return the key for a step's prompts: how many scans run in parallel, and how long they are."""
    heads, tokens = shape.num_heads * num_seqs, num_tokens // max(1, num_seqs)
    return {"kernel": "scan", **shape.words, "heads": heads, "tokens_per_seq": tokens}


def step_options(shape: SSDShape, num_seqs: int, device: torch.device) -> Options:
    return tuned.config("ssd", device, step_key(shape, num_seqs), _narrowed(STEP, shape))


def scan_options(shape: SSDShape, num_seqs: int, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Options:
    default = _narrowed(SCAN, shape)
    if shape.state_dim >= WIDE_STATE:
        default = {**default, "num_warps": 8}
    if dtype.itemsize > 2:  # tiles are twice as large, so tuned options may not fit
        return {**default, "num_stages": 1}
    return tuned.config("ssd", device, scan_key(shape, num_seqs, num_tokens), default)


def _narrowed(options: Options, shape: SSDShape) -> Options:
    """Return the options with a program's rows limited to the largest power of two that divides the rows of a state."""
    return {**options, "VALUES": min(options["VALUES"], shape.head_dim & -shape.head_dim)}
