"""Tuning candidates of FP8 linear layers, at the shapes of 8B to 70B models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from baton.kernels.roofline import copies_beyond_caches, cycling
from baton.kernels.tune import Problem
from baton.kernels.tuned import Options

from .bench import random_weight
from .gpu import MANY_TOKENS
from .gpu.gemm import product, tuning_key
from .gpu.quantization import quantize
from .weight import BLOCK

SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (10240, 8192), (8192, 28672))  # N, K
TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024)


def problems(device: torch.device) -> Iterator[Problem]:
    for (columns, depth), in_blocks, tokens in itertools.product(SHAPES, (True, False), TOKENS):
        if tokens <= MANY_TOKENS["blocks" if in_blocks else "rows"] or (in_blocks and depth <= 4096):
            yield _problem(tokens, columns, depth, in_blocks, device)


def _problem(tokens: int, columns: int, depth: int, in_blocks: bool, device: torch.device) -> Problem:
    def make_run(options: Options) -> Callable[[], object]:
        return cycling(lambda weight: product(quantized, scale, weight, None, out, options), weights)

    weights = [random_weight(columns, depth, in_blocks, device) for _ in range(copies_beyond_caches(columns * depth))]
    out = torch.empty(tokens, columns, dtype=torch.bfloat16, device=device)
    quantized, scale = quantize(torch.randn(tokens, depth, device=device), BLOCK if in_blocks else depth)
    return Problem(tuning_key(quantized, weights[0]), list(_candidates(tokens)), make_run)


def _candidates(tokens: int) -> Iterator[Options]:
    if tokens <= 64:
        height = max(16, tokens)
        for width, groups, split, stages in itertools.product((64, 128), (1, 2), (1, 2, 4), (3, 4, 6)):
            yield _options(height, width, groups, turned=1, split=split, stages=stages, num_warps=4)
    if tokens >= 64:
        for width, groups, split, stages in itertools.product((64, 128), (1, 2), (1, 2), (3, 4, 5)):
            yield _options(64, width, groups, turned=0, split=split, stages=stages, num_warps=4)
    if tokens >= 128:
        for width, stages in itertools.product((64, 128), (3, 4, 5)):
            yield _options(128, width, 1, turned=0, split=1, stages=stages, num_warps=8)
        yield _options(256, 128, 1, turned=0, split=1, stages=3, num_warps=8)


def _options(
    tokens: int, columns: int, groups: int, *, turned: int, split: int, stages: int, num_warps: int
) -> Options:
    return {
        "TOKENS": tokens,
        "COLUMNS": columns,
        "GROUPS": groups,
        "TURNED": turned,
        "SPLIT": split,
        "STAGES": stages,
        "num_warps": num_warps,
    }
