"""Tuning candidates of linear layers, at the shapes of `bench.LAYERS`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from baton.kernels.roofline import copies_beyond_caches, cycling
from baton.kernels.tune import Problem
from baton.kernels.tuned import Options

from . import gpu
from .bench import LAYERS, LayerShape
from .gpu import Method
from .operands import RowNorm

# Registers of a `gemv` thread for weights, two per register, beside its sums.
MOST_REGISTERS = 96
# Largest number of tokens -> candidates of `gemm`: BLOCK_N, BLOCK_K, warps, stages.
TILES = {
    16: ((16, 256, 4, 4), (32, 128, 4, 5), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 5)),
    32: ((32, 128, 4, 5), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 5)),
    64: ((64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 5), (128, 128, 8, 3)),
    128: ((64, 64, 4, 5), (128, 64, 8, 4), (128, 128, 8, 3)),
    256: ((64, 64, 4, 4), (128, 64, 8, 4)),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FULL_DEVICE = range(90, 1100)  # candidates that split the depth have a number of programs in this range


def problems(device: torch.device) -> Iterator[Problem]:
    for shape in LAYERS:
        yield from _problems_of(shape, device)


def _problems_of(shape: LayerShape, device: torch.device) -> Iterator[Problem]:
    """Yield one problem for each number of tokens, with the same weights."""
    copies = copies_beyond_caches(shape.weight_rows * shape.depth * 2)
    weights = [torch.randn(shape.weight_rows, shape.depth, dtype=torch.bfloat16, device=device) for _ in range(copies)]
    norm = RowNorm(torch.ones(shape.depth, dtype=torch.bfloat16, device=device), 1e-6) if shape.norm else None
    for tokens in TOKENS:
        key = gpu.tuning_key(tokens, shape.columns, shape.depth, gated=shape.gated)
        yield Problem(key, list(_candidates(shape, tokens)), _runs(shape, tokens, weights, norm))


def _runs(
    shape: LayerShape, tokens: int, weights: list[torch.Tensor], norm: RowNorm | None
) -> Callable[[Options], Callable[[], object]]:
    x = torch.randn(tokens, shape.depth, dtype=torch.bfloat16, device=weights[0].device)
    add_to = x.new_zeros(tokens, shape.columns) if shape.add else None

    def make_run(options: Options) -> Callable[[], object]:
        def run(weight: torch.Tensor) -> None:
            gpu.linear(
                x, weight, None, norm=norm, add_to=add_to, out=None, activation=shape.activation, options=options
            )

        return cycling(run, weights)

    return make_run


def _candidates(shape: LayerShape, tokens: int) -> Iterator[Options]:
    yield gpu.UNTUNED_MANY
    if tokens <= gpu.MAX_TOKENS:
        yield from _gemv_candidates(shape, tokens)
    yield from _gemm_candidates(shape, max(tokens, gpu.SMALLEST_TILE))


def _gemv_candidates(shape: LayerShape, tokens: int) -> Iterator[Options]:
    warps_of = ((256, 1), (256, 2), (512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8))
    for rows, (block_k, num_warps) in itertools.product((2, 4, 8, 16), warps_of):
        registers = rows * block_k // (64 * num_warps)  # of one step
        steps = shape.depth // block_k
        if shape.depth % block_k or registers > MOST_REGISTERS or rows * tokens > 32:
            continue
        most = min(steps, MOST_REGISTERS // registers)
        ahead = {(most, 0)} if most == steps else {(most, 0), (most, 1)}
        for preload, prefetch in sorted(ahead):
            yield {
                **gpu.UNTUNED_FEW,
                "BLOCK_N": rows,
                "BLOCK_K": block_k,
                "PRELOAD": preload,
                "PREFETCH": prefetch,
                "num_warps": num_warps,
            }


def _gemm_candidates(shape: LayerShape, tokens: int) -> Iterator[Options]:
    for block_n, block_k, num_warps, stages in TILES[tokens]:
        for split in (1, 2, 4, 8, 16):
            programs = shape.weight_rows // block_n * split
            if shape.depth % (split * block_k) == 0 and (programs in FULL_DEVICE or split == 1):
                yield {
                    "method": Method.TILES,
                    "TOKENS": tokens,
                    "BLOCK_N": block_n,
                    "BLOCK_K": block_k,
                    "SPLIT": split,
                    "PRELOAD": 0,
                    "PREFETCH": stages,
                    "num_warps": num_warps,
                    "num_stages": stages,
                }
