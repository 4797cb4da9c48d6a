"""Paged attention on a GPU: decodes and everything else go to kernels of their own."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from baton.kernels.device import is_hopper

from ..batch import AttentionBatch
from ..rule import AttentionRule
from . import decode_fp8_hopper, decode_hopper
from .decode import paged_decode, plan_decode
from .decode_short import plan_short, short_decode
from .plan import DecodePlan, Prepared, ShortPlan, prepared
from .prefill import paged_prefill
from .prefill_few import plan_few
from .prefill_plan import plan_prefill

__all__ = ["paged_attention", "prepare"]


def prepare(batch: AttentionBatch, kv: Tensor, *, num_heads: int) -> AttentionBatch:
    """See `baton.kernels.attention.prepare`. Looks at shapes only: safe inside a captured graph."""
    heads = {"num_heads": num_heads, "num_kv_heads": kv.shape[1], "head_dim": kv.shape[5]}
    first_prefill = batch.num_decodes
    decode: DecodePlan | ShortPlan | None = None
    if first_prefill > 0:
        decode = plan_short(batch, **heads)
        if decode is None and is_hopper(kv.device):
            for kernel in (decode_hopper, decode_fp8_hopper):
                decode = decode or kernel.plan_fetches(batch, kv, num_heads)
        decode = decode or plan_decode(batch, **heads)
    prefill = None
    if first_prefill < batch.num_tokens:
        prefill = plan_few(batch, first_prefill, **heads) or plan_prefill(batch, first_prefill, **heads)
    return dataclasses.replace(batch, prepared=Prepared(decode, prefill))


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
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    match plans.decode:
        case DecodePlan(fetches=True) as plan if decode_hopper.serves(q, kv, rule):
            decode_hopper.fetched_decode(q, kv, layer, batch, plan, rule, out=out)
        case DecodePlan(fetches=True) as plan if decode_fp8_hopper.serves(q, kv):
            decode_fp8_hopper.fetched_decode(q, kv, layer, batch, plan, rule, out=out)
        case DecodePlan() as plan:
            paged_decode(q, kv, layer, batch, plan, rule, out=out)
        case ShortPlan() as plan:
            short_decode(q, kv, layer, batch, plan, rule, out=out)
    if plans.prefill is not None:
        paged_prefill(q, kv, layer, batch, plans.prefill, rule, out=out)
    return out
