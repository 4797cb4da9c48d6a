"""Long prompts: keys and values of every head are spelt out once for all of a chunk's queries.

pages ──gather──> latents [K, rank + rope] ──kv_b_proj──> [K, heads, nope | value] ──causal attention──> out
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.attention.batch import AttentionBatch
from baton.kernels.attention.gpu import dense_hopper
from baton.kernels.attention.gpu.prefill_plan import PrefillPlan, plan_prefill
from baton.kernels.device import is_hopper

from ..up import MAX_EXPANDED_TOKENS, UpProjection
from . import dense
from .gather import find_sources, gather

LEAST_QUERIES = 128  # of a sequence, on average: with fewer, spelling out a key costs more than it saves
PAGE = 16


@dataclass(frozen=True)
class ExpandedPrompts:
    """The sequences of a step whose keys and values are spelt out, laid out one after another."""

    sources: Tensor  # [num_kv_tokens] int64: slot of every key; -1 where the bound was larger than the keys
    key_start: Tensor  # [num_seqs + 1] int32: row of the first key of each sequence; 0 for the decodes
    plan: PrefillPlan


def pays_to_expand(batch: AttentionBatch) -> bool:
    """Whether the sequences behind the decodes are long enough chunks, and the host knows how many keys they have."""
    num_seqs, num_tokens = batch.num_seqs - batch.num_decodes, batch.num_tokens - batch.num_decodes
    if batch.num_kv_tokens is None or batch.num_kv_tokens > MAX_EXPANDED_TOKENS:
        return False
    return num_seqs > 0 and num_tokens >= LEAST_QUERIES * num_seqs


def expand(batch: AttentionBatch, num_heads: int, head_dim: int) -> ExpandedPrompts:
    """Where the keys come from and which program serves which queries. Not for captured graphs."""
    assert batch.num_kv_tokens is not None
    first = batch.num_decodes
    key_start = functional.pad(batch.seq_lens[first:].cumsum(0, dtype=torch.int32), (first + 1, 0))
    sources = find_sources(batch, first, key_start, batch.num_kv_tokens, PAGE)
    by_number = dataclasses.replace(batch, table_rows=None)
    plan = plan_prefill(by_number, first, num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim)
    return ExpandedPrompts(sources, key_start, plan)


def expanded_attention(
    q: Tensor, kv: Tensor, layer: int, prompts: ExpandedPrompts, up: UpProjection, *, scale: float, out: Tensor
) -> None:
    """Writes the rows of out [T, H, value_dim] that belong to `prompts`."""
    latents = gather(kv, layer, prompts.sources)
    keys_values = functional.linear(latents[:, : up.rank], up.weight).unflatten(1, (up.num_heads, -1))
    k_rope, plan = latents[:, up.rank :], prompts.plan
    kernel = dense_hopper if is_hopper(q.device) and dense_hopper.fits(q, keys_values, k_rope, plan) else dense
    kernel.dense_prefill(q, keys_values, k_rope, prompts.key_start, plan, scale=scale, out=out)
