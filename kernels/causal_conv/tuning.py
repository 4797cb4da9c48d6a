"""Tuning candidates of the causal convolution, at the sizes of `bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from baton.kernels.tune import Problem
from baton.kernels.tuned import Key, Options

from . import gpu
from .bench import CHANNELS, WIDTH, step

DECODES = (1, 16, 64, 256)  # sequences
PREFILLS = ((1, 1024), (16, 4096))  # sequences, tokens of each
STEPS: list[Options] = [
    {"CHANNELS": channels, "num_warps": warps}
    for channels, warps in ((64, 1), (128, 1), (256, 1), (256, 2), (512, 2), (512, 4), (1024, 4))
]
CHUNKS: list[Options] = [
    {"CHANNELS": channels, "ROWS": rows, "num_warps": warps}
    for channels, rows, warps in (
        *((64, 8, 1), (128, 2, 1), (128, 4, 1), (128, 8, 1), (128, 16, 1)),
        *((256, 2, 1), (256, 4, 1), (256, 8, 1), (256, 2, 2), (256, 4, 2), (256, 8, 2)),
        *((512, 2, 2), (512, 4, 2), (512, 4, 4), (512, 8, 4)),
    )
]


def problems(device: torch.device) -> Iterator[Problem]:
    for num_seqs in DECODES:
        yield _problem([1] * num_seqs, gpu.step_key(WIDTH, CHANNELS, num_seqs), "step", STEPS, device)
    for num_seqs, length in PREFILLS:
        key = gpu.chunk_key(WIDTH, CHANNELS, num_seqs * length)
        yield _problem([length] * num_seqs, key, "chunks", CHUNKS, device)


def _problem(lengths: list[int], key: Key, kernel: str, candidates: Sequence[Options], device: torch.device) -> Problem:
    made = step(lengths, device)

    def make_run(options: Options) -> Callable[[], object]:
        return made.run(gpu.causal_conv, **{kernel: options})

    return Problem(key, candidates, make_run)
