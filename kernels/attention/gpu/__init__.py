"""Paged attention on a GPU: the choice of kernels for the sequences of a step.

one short decode        decode_short
decodes                 decode_hopper (16-bit cache), decode_fp8_hopper (E4M3 cache), decode (any device and type)
prefill, few tokens     prefill_split_kv
prefill, many tokens    prefill_hopper (16-bit or E4M3 cache), prefill_tiles (any device and type)

The kernels for decodes also serve decodes with a few drafts.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.kv_rows import kv_rows
from baton.kernels.launch import is_hopper
from baton.kernels.query_tiles import PrefillPlan, plan_prefill

from ..rule import AttentionRule
from . import decode_fp8_hopper, decode_hopper, prefill_hopper
from .decode import paged_decode
from .decode_options import has_few_queries, plan_decode
from .decode_plan import AttentionPlans, DecodePlan, ShortPlan, prepared
from .decode_short import plan_short, short_decode
from .prefill_split_kv import plan_split_prefill, prefill_split_kv
from .prefill_tiles import prefill_tiles

__all__ = ["paged_attention", "prepare"]


def prepare(batch: AttentionBatch, kv: Tensor, *, num_heads: int, head_dim: int | None = None) -> AttentionBatch:
    """See `baton.kernels.attention.prepare`. Reads shapes only, so a CUDA graph may capture it."""
    head_dim = kv.shape[5] if head_dim is None else head_dim
    heads = {"num_heads": num_heads, "num_kv_heads": kv.shape[1], "head_dim": head_dim}
    value_dim = kv_rows(kv, head_dim).value_dim
    first_prefill = batch.num_decodes
    decode: DecodePlan | ShortPlan | None = plan_short(batch, kv, **heads, value_dim=value_dim)
    if decode is None and (first_prefill > 0 or has_few_queries(batch, num_heads // kv.shape[1])):
        if is_hopper(kv.device) and value_dim == head_dim:
            for kernel in (decode_hopper, decode_fp8_hopper):
                decode = decode or kernel.plan_tma_decode(batch, kv, num_heads)
        decode = decode or plan_decode(batch, **heads, value_dim=value_dim)
    if decode is not None and first_prefill == 0:
        return dataclasses.replace(batch, prepared=AttentionPlans(decode, prefill=None))
    prefill = None
    if first_prefill < batch.num_tokens:
        prefill = plan_split_prefill(batch, first_prefill, **heads, value_dim=value_dim)
        prefill = prefill or plan_prefill(batch, first_prefill, **heads)
    return dataclasses.replace(batch, prepared=AttentionPlans(decode, prefill))


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    rule: AttentionRule,
    *,
    out: Tensor | None,
) -> Tensor:
    """See `baton.kernels.attention.paged_attention`. Raises `ValueError` for a batch that `prepare` has not seen."""
    plans = prepared(batch)
    if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
        q = q.contiguous()
    if out is None:
        out = torch.empty((*q.shape[:2], kv_rows(kv, q.shape[2]).value_dim), dtype=q.dtype, device=q.device)
    match plans.decode:
        case DecodePlan(uses_tma=True) as plan if decode_hopper.serves(q, kv, rule):
            decode_hopper.tma_decode(q, kv, layer, batch, plan, rule, out=out)
        case DecodePlan(uses_tma=True) as plan if decode_fp8_hopper.serves(q, kv):
            decode_fp8_hopper.tma_decode(q, kv, layer, batch, plan, rule, out=out)
        case DecodePlan() as plan:
            paged_decode(q, kv, layer, batch, plan, rule, out=out)
        case ShortPlan() as plan:
            short_decode(q, kv, layer, batch, plan, rule, out=out)
    if plans.prefill is not None:
        paged_prefill(q, kv, layer, batch, plans.prefill, rule, out=out)
    return out


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    plan: PrefillPlan,
    rule: AttentionRule,
    *,
    out: Tensor,
) -> None:
    """Write the rows of `out` that `plan` covers: its sequences, and the padding tokens after them.

    See `baton.kernels.attention.paged_attention`.
    """
    if plan.split is not None:
        prefill_split_kv(q, kv, layer, batch, plan, plan.split, rule, out=out)
    elif is_hopper(q.device) and prefill_hopper.fits(q, kv, plan, rule):
        prefill_hopper.prefill_pages(q, kv, layer, batch, plan, rule, out=out)
    else:
        prefill_tiles(q, kv, layer, batch, plan, rule, out=out)
