"""Tuning candidates of decode attention, at the shapes of models of 0.6B to 70B."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch

from baton.kernels.roofline import copies_beyond_caches, cycling
from baton.kernels.tune import Problem
from baton.kernels.tuned import Options

from . import AttentionRule, paged_attention
from .bench import AttentionModel, step
from .gpu.decode_combine import MOST_SEQS
from .gpu.decode_options import decode_plan, tuning_key
from .gpu.decode_plan import prepared

HEADS = ((16, 8, 128), (32, 8, 128), (32, 4, 128), (64, 8, 128), (32, 8, 64))  # query heads, KV heads, dimensions
CONTEXTS = ((1, 8192), (4, 2048), (16, 2048), (64, 2048), (256, 1024))  # number of sequences, tokens of each
BLOCKS = ((32, 4, 2), (32, 3, 4), (64, 2, 4), (128, 1, 8))  # unit_tokens, programs, num_warps
CANDIDATES: list[Options] = [
    {
        "unit_tokens": unit_tokens,
        "programs": programs,
        "min_units": min_units,
        "early_units": early_tokens // unit_tokens,
        "apart": 0,
        "num_warps": num_warps,
        "num_stages": 3 if unit_tokens == 128 else 5,
    }
    for (unit_tokens, programs, num_warps), min_units, early_tokens in itertools.product(BLOCKS, (1, 2), (0, 128))
]


FEW_CANDIDATES: list[Options] = [{**options, "apart": apart} for options in CANDIDATES for apart in (0, 1)]


def problems(device: torch.device) -> Iterator[Problem]:
    for heads, (num_seqs, context) in itertools.product(HEADS, CONTEXTS):
        yield _problem(*heads, num_seqs, context, device)


def _problem(
    num_heads: int, num_kv_heads: int, head_dim: int, num_seqs: int, context: int, device: torch.device
) -> Problem:
    """Return a step of `num_seqs` decodes, with so many layers that their KV does not fit in a hardware cache."""

    def make_run(options: Options) -> Callable[[], object]:
        plan = decode_plan(batch, options, num_heads=num_heads, num_kv_heads=num_kv_heads, value_dim=head_dim)
        planned = dataclasses.replace(batch, prepared=dataclasses.replace(prepared(batch), decode=plan))
        return cycling(lambda layer: paged_attention(q, kv, layer, planned, rule), range(kv.shape[2]))

    rule = AttentionRule(head_dim**-0.5)
    layer_bytes = 2 * 2 * num_seqs * context * num_kv_heads * head_dim
    model = AttentionModel(num_heads, num_kv_heads, head_dim, num_layers=copies_beyond_caches(layer_bytes))
    batch, kv, q = step(model, [(1, context)] * num_seqs, torch.bfloat16, device)
    key = tuning_key(
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_seqs=num_seqs,
    )
    return Problem(key, FEW_CANDIDATES if num_seqs <= MOST_SEQS else CANDIDATES, make_run)
