"""Tuning candidates of the expert kernels, for the mixtures of experts of `bench`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from baton.kernels.roofline import cycling
from baton.kernels.tune import Problem
from baton.kernels.tuned import Options

from . import ExpertWeights, RoutingRule, route
from .bench import LARGE, experts_of
from .gpu import gemv, grouped_experts
from .gpu.options import GemvOptions, GroupedOptions, MoeShape, ProductOptions, tuning_key

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
PRODUCTS = {  # by the rows of a tile: columns, depth, warps, stages
    16: ((128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 8, 4), (256, 64, 4, 4), (256, 64, 8, 4)),
    32: ((128, 128, 4, 3), (128, 128, 4, 4), (128, 64, 4, 5)),
    64: ((128, 64, 4, 4), (128, 128, 8, 3), (256, 64, 4, 3), (256, 64, 8, 3), (256, 64, 8, 4)),
    128: ((128, 64, 4, 3), (128, 64, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4)),
}
PRODUCTS_IN_8_BITS = {
    16: ((128, 128, 4, 4), (128, 128, 4, 6), (64, 128, 4, 6)),
    32: ((128, 128, 4, 4), (128, 128, 4, 5), (64, 128, 4, 5)),
    64: ((128, 128, 4, 3), (128, 128, 8, 3), (128, 128, 8, 4)),
    128: ((128, 128, 8, 3), (128, 64, 8, 4), (256, 64, 8, 3)),
}
GATE_UP_FEW = ((4, 1024, 4), (4, 2048, 4), (8, 512, 4), (8, 1024, 8))  # columns, depth, warps
DOWN_FEW = ((1, 256, 2), (2, 256, 4), (2, 256, 8), (4, 256, 8))


ROUTINGS = 9  # routings that a measurement cycles through
TALLEST = 4  # largest height of a tile, in heights of a short one
FAVOURS = (0.0, 2.0, 4.0)  # standard deviations of logits between experts, the same for all tokens


def problems(device: torch.device) -> Iterator[Problem]:
    for model in LARGE:
        experts = experts_of(model, device)
        for num_tokens in TOKENS:
            yield _problem(experts, LARGE[model][1], num_tokens)


def _problem(experts: ExpertWeights, top_k: int, num_tokens: int) -> Problem:
    device = experts.down.device
    shape = MoeShape(num_tokens, experts.num_experts, top_k, experts.hidden_size, experts.width, experts.in_8_bits)
    x = torch.randn(num_tokens, shape.hidden_size, dtype=torch.bfloat16, device=device)
    routings = [route(logits, RoutingRule(top_k)) for logits in _logits(num_tokens, shape.num_experts, device)]

    def run_few(options: Options) -> Callable[[], object]:
        chosen = GemvOptions(**options)
        return cycling(lambda pair: gemv.fused_experts(x, experts, pair[0], pair[1], None, chosen), routings)

    def run_grouped(options: Options) -> Callable[[], object]:
        chosen = GroupedOptions.from_flat(options)
        return cycling(lambda pair: grouped_experts(x, experts, pair[0], pair[1], None, chosen), routings)

    if shape.is_few:
        return Problem(tuning_key("few", shape), list(_few_candidates()), run_few)
    return Problem(tuning_key("grouped", shape), list(grouped_candidates(shape)), run_grouped)


def _logits(num_tokens: int, num_experts: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield logits [T, E] of `ROUTINGS` routings, in which experts are more and more preferred (`FAVOURS`), in turn."""
    for _, favour in zip(range(ROUTINGS), itertools.cycle(FAVOURS), strict=False):
        ahead = torch.randn(num_experts, device=device) * favour
        yield torch.randn(num_tokens, num_experts, device=device) + ahead


def _few_candidates() -> Iterator[Options]:
    names = GemvOptions.__dataclass_fields__
    for gate_up, down in itertools.product(GATE_UP_FEW, DOWN_FEW):
        yield dict(zip(names, (*gate_up, *down), strict=True))


def grouped_candidates(shape: MoeShape) -> Iterator[Options]:
    """Yield tiles with half to four times an expert's average number of rows, and taller ones for popular experts."""
    rows = shape.num_tokens * shape.top_k / shape.num_experts
    products = PRODUCTS_IN_8_BITS if shape.in_8_bits else PRODUCTS
    heights = [height for height in products if rows / 2 <= height < max(32, 4 * rows)] or [max(products)]
    for short in heights:
        for tall in (height for height in products if short <= height <= TALLEST * short):
            for gate_up, down in itertools.product(products[tall], repeat=2):
                yield GroupedOptions(tall, short, ProductOptions(*gate_up), ProductOptions(*down)).flat()
