"""What may be best at which shape, for `baton.kernels.tune`: the mixtures of experts of `bench`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from baton.kernels.roofline import cycling
from baton.kernels.tune import Problem
from baton.kernels.tuned import Options

from . import RoutingRule, route
from .bench import LARGE, ROUTINGS, weights_of
from .gpu import few, grouped_experts
from .gpu.options import FewOptions, GroupedOptions, ProductOptions, Shape, tuning_key

TOKENS = (1, 2, 4, 8, 16, 64, 256, 512, 1024, 4096, 16384)
PRODUCTS = {  # by the rows of a tile: columns, depth, warps, stages
    16: ((128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 8, 4)),
    32: ((128, 128, 4, 3), (128, 128, 4, 4), (128, 64, 4, 5)),
    64: ((128, 64, 4, 4), (256, 64, 4, 3), (256, 64, 8, 3)),
    128: ((128, 64, 4, 3), (128, 64, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4)),
}
GATE_UP_FEW = ((4, 1024, 4), (4, 2048, 4), (8, 512, 4), (8, 1024, 8))  # columns, depth, warps
DOWN_FEW = ((1, 256, 2), (2, 256, 4), (2, 256, 8), (4, 256, 8))


def problems(device: torch.device) -> Iterator[Problem]:
    for model in LARGE:
        gate_up, down = weights_of(model, device)
        for num_tokens in TOKENS:
            yield _problem(gate_up, down, LARGE[model][1], num_tokens)


def _problem(gate_up: Tensor, down: Tensor, top_k: int, num_tokens: int) -> Problem:
    num_experts, hidden_size, width = down.shape
    shape = Shape(num_tokens, num_experts, top_k, hidden_size, width)
    x = torch.randn(num_tokens, hidden_size, dtype=down.dtype, device=down.device)
    all_logits = torch.randn(ROUTINGS, num_tokens, num_experts, device=down.device)
    routings = [route(logits, RoutingRule(top_k)) for logits in all_logits]

    def run_few(options: Options) -> Callable[[], object]:
        chosen = FewOptions(**options)
        return cycling(lambda pair: few.fused_experts(x, gate_up, down, pair[0], pair[1], None, chosen), routings)

    def run_grouped(options: Options) -> Callable[[], object]:
        chosen = GroupedOptions.from_flat(options)
        return cycling(lambda pair: grouped_experts(x, gate_up, down, pair[0], pair[1], None, chosen), routings)

    if shape.is_few:
        return Problem(tuning_key("few", shape), list(_few_candidates()), run_few)
    return Problem(tuning_key("grouped", shape), list(_grouped_candidates(shape)), run_grouped)


def _few_candidates() -> Iterator[Options]:
    names = FewOptions.__dataclass_fields__
    for gate_up, down in itertools.product(GATE_UP_FEW, DOWN_FEW):
        yield dict(zip(names, (*gate_up, *down), strict=True))


def _grouped_candidates(shape: Shape) -> Iterator[Options]:
    """Tiles that hold from half to four times the rows that an expert has on average, where there are such."""
    rows = shape.num_tokens * shape.top_k / shape.num_experts
    heights = [height for height in PRODUCTS if rows / 2 <= height < max(32, 4 * rows)] or [max(PRODUCTS)]
    for height in heights:
        for gate_up, down in itertools.product(PRODUCTS[height], repeat=2):
            yield GroupedOptions(height, ProductOptions(*gate_up), ProductOptions(*down)).flat()
