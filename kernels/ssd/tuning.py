"""Tuning candidates of Mamba-2's recurrence, at the sizes of `bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from baton.kernels.state_bench import DECODES, PREFILLS
from baton.kernels.tune import Problem
from baton.kernels.tuned import Key, Options

from . import gpu
from .bench import GRANITE_4, NEMOTRON_H, MambaModel, step
from .gpu.options import SSDShape, scan_key, step_key

STEPS: list[Options] = [
    {"VALUES": values, "num_warps": warps}
    for values, warps in (
        *((4, 1), (8, 1), (16, 1), (32, 1)),
        *((8, 2), (16, 2), (32, 2), (64, 2)),
        *((16, 4), (32, 4), (64, 4)),
    )
]
SCANS: list[Options] = [
    {"VALUES": values, "SEGMENTS": segments, "num_warps": warps, "num_stages": stages}
    for values, segments, warps, stages in (
        *((64, 1, 4, 1), (64, 1, 4, 2), (64, 1, 4, 3), (64, 1, 8, 2), (32, 1, 4, 2), (32, 1, 4, 3)),
        *((64, 2, 4, 2), (64, 4, 4, 2), (64, 8, 4, 2), (64, 16, 4, 2)),
        *((64, 2, 4, 3), (64, 4, 4, 3), (64, 8, 4, 3), (64, 16, 4, 3)),
    )
]
MOST_DIVIDED = 1024  # heads of all sequences: more of them fill every device without segments


def problems(device: torch.device) -> Iterator[Problem]:
    for model in (NEMOTRON_H, GRANITE_4):
        shape = SSDShape(model.num_heads, model.num_heads // model.num_groups, model.head_dim, model.state_dim)
        for num_seqs in DECODES:
            yield _problem(model, [1] * num_seqs, step_key(shape, num_seqs), "step", STEPS, device)
        for num_seqs, length in PREFILLS:
            key = scan_key(shape, num_seqs, num_seqs * length)
            is_divided = model.num_heads * num_seqs <= MOST_DIVIDED
            scans = [options for options in SCANS if is_divided or options["SEGMENTS"] == 1]
            yield _problem(model, [length] * num_seqs, key, "scan", scans, device)


def _problem(
    model: MambaModel, lengths: list[int], key: Key, kernel: str, candidates: Sequence[Options], device: torch.device
) -> Problem:
    made = step(model, lengths, device)

    def make_run(options: Options) -> Callable[[], object]:
        return made.run(gpu.ssd, **{kernel: options})

    return Problem(key, candidates, make_run)
