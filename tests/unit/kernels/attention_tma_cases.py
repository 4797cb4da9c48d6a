"""Caches and shapes that tests of the decode kernels for Hopper share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels.attention import AttentionRule
from baton.kernels.attention.gpu import decode_fp8_hopper, decode_hopper

from .decode_attention_inputs import queries
from .kernel_checks import PagedSequences

WIDE, NARROW = torch.bfloat16, torch.float8_e4m3fn
KERNELS = {WIDE: decode_hopper, torch.float16: decode_hopper, NARROW: decode_fp8_hopper}  # by dtype of the cache
either_cache = pytest.mark.parametrize("cache", [WIDE, NARROW], ids=str)


def rule_for(sequences: PagedSequences, **options: Any) -> AttentionRule:
    """Return a rule with scales if the cache is FP8; `options` override them."""
    kv, scales = sequences.kv, {}
    if kv.dtype == NARROW:
        scales = {"k_scale": torch.tensor(0.5, device=kv.device), "v_scale": torch.tensor([1.7], device=kv.device)}
    return AttentionRule(kv.shape[5] ** -0.5, **{**scales, **options})


def queries_for(sequences: PagedSequences, num_heads: int) -> Tensor:
    return queries(sequences, num_heads, WIDE if sequences.kv.dtype == NARROW else None)
