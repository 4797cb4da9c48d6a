"""Tuning candidates of the gated delta rule, at the sizes of `bench`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from baton.kernels.state_bench import DECODES, PREFILLS
from baton.kernels.tune import Problem
from baton.kernels.tuned import Key, Options

from . import gpu
from .bench import GDN, KDA, DeltaModel, step
from .gpu.options import Shape, intra_key, scan_key, step_key

STEPS: list[Options] = [
    {"VALUES": values, "LANES": lanes, "num_warps": warps}
    for values, lanes, warps in (
        *((8, 0, 1), (16, 0, 1), (16, 0, 2), (32, 0, 1), (32, 0, 2), (32, 0, 4)),
        *((16, 8, 1), (32, 4, 1), (32, 8, 2), (64, 8, 2), (64, 8, 4), (128, 4, 4), (128, 8, 4)),
    )
]
INTRAS: list[Options] = [
    {"HEADS": heads, "SOLVE": solve, "num_warps": warps, "num_stages": 1}
    for heads, solve, warps in itertools.product((1, 2), (8, 16), (4, 8))
]
INTRAS_PER_DIM: list[Options] = [
    {"DIMS": dims, "SOLVE": solve, "num_warps": warps, "num_stages": 1}
    for dims, solve, warps in itertools.product((32, 64), (8, 16), (4, 8))
]
SCANS: list[Options] = [
    {"VALUES": values, "num_warps": warps, "num_stages": stages}
    for (values, warps), stages in itertools.product(((32, 4), (64, 4), (64, 8), (128, 8)), (2, 3))
]


def problems(device: torch.device) -> Iterator[Problem]:
    for model in (GDN, KDA):
        shape = Shape(model.num_heads, model.num_heads // model.num_key_heads, model.dim, model.dim, model.per_dim)
        for num_seqs in DECODES:
            yield _problem(model, [1] * num_seqs, step_key(shape, num_seqs), "step", STEPS, device)
        for num_seqs, length in PREFILLS:
            tokens = num_seqs * length
            intras = [options for options in INTRAS if shape.group % options["HEADS"] == 0]
            intras = INTRAS_PER_DIM if shape.per_dim else intras
            yield _problem(model, [length] * num_seqs, intra_key(shape, tokens), "intra", intras, device)
            yield _problem(model, [length] * num_seqs, scan_key(shape, num_seqs, tokens), "scan", SCANS, device)


def _problem(
    model: DeltaModel, lengths: list[int], key: Key, kernel: str, candidates: Sequence[Options], device: torch.device
) -> Problem:
    """Return the tuning problem of one kernel. A run also launches the step's other kernels, with fixed options."""
    made = step(model, lengths, device)

    def make_run(options: Options) -> Callable[[], object]:
        return made.run(gpu.gated_delta, **{kernel: options})

    return Problem(key, candidates, make_run)
