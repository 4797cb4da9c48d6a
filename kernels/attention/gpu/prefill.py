"""Attention of sequences with any number of query tokens over their pages: prompts, chunks of prompts, mixed steps."""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from baton.kernels.device import is_hopper

from ..batch import AttentionBatch
from .prefill_few import prefill_few
from .prefill_plan import PrefillPlan
from .prefill_tiles import prefill_tiles


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    plan: PrefillPlan,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
) -> None:
    """Writes the rows of `out` that `plan` covers: its sequences, and the padding tokens behind them.

    See `baton.kernels.attention.paged_attention`.
    """
    score_unit, cap_scale = units(scale, soft_cap)
    options: dict[str, Any] = {"score_unit": score_unit, "cap_scale": cap_scale, "window": window}
    options |= {"sinks": sinks, "out": out}
    hopper = _hopper(q.device)
    if plan.split is not None:
        prefill_few(q, kv, layer, batch, plan, plan.split, **options, k_scale=k_scale, v_scale=v_scale)
    elif hopper is not None and hopper.fits(q, kv, plan):
        hopper.prefill_pages(q, kv, layer, batch, plan, **options)
    else:
        prefill_tiles(q, kv, layer, batch, plan, **options, k_scale=k_scale, v_scale=v_scale)


def units(scale: float, soft_cap: float | None) -> tuple[float, float | None]:
    """(score_unit, cap_scale): weights are 2^(score_unit * s), with s = q k, or, capped, s = tanh(q k * scale / cap).

    tanh(x) = 1 - 2 / (e^2x + 1) = 1 - 2 / (2^(cap_scale * q k) + 1).
    """
    log2_e = math.log2(math.e)
    if soft_cap is None:
        return scale * log2_e, None
    return soft_cap * log2_e, 2 * log2_e * scale / soft_cap


@functools.cache
def _hopper(device: torch.device) -> ModuleType | None:
    """The kernel for Hopper, on one."""
    if not is_hopper(device):
        return None
    from . import prefill_hopper

    return prefill_hopper
