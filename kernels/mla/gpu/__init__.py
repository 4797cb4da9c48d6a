"""Multi-head latent attention on a GPU: the choice between its two forms for the tokens of a step.

    absorbed    queries are projected to the space of latents, which are both keys and values: for decodes, short
                chunks, and everything in a captured graph
                                                         work_list, head_products, absorbed or absorbed_hopper, combine
    expanded    keys and values of every head are computed from latents, once for all queries of a long chunk
                                                         expanded, dense or dense_hopper

`latent_cache` norms and rotates latents, and writes them to the KV cache.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.launch import is_hopper, next_power_of_2

from ..up_projection import UpProjection
from . import absorbed, absorbed_hopper, head_products
from .expanded import ExpandedPrompts, expand, expanded_attention, pays_to_expand
from .latent_cache import latent_and_cache
from .partial_results import PartialResults
from .work_list import WorkList, WorkTiles, plan_work

__all__ = ["latent_and_cache", "mla_attention", "prepare"]

LEAST_ROWS, MOST_ROWS = 16, 64  # the least that a matrix product needs; the most whose sums fit in registers
TILE = 64  # keys


@dataclass(frozen=True)
class MLAPlans:
    """The work of one step, shared by its layers."""

    absorbed: WorkList | None
    num_absorbed_tokens: int  # the step's first tokens are absorbed; the others belong to `prompts`
    prompts: ExpandedPrompts | None


def prepare(batch: AttentionBatch, *, num_heads: int, head_dim: int, tile: int | None = None) -> AttentionBatch:
    """See `baton.kernels.mla.prepare`. `tile` is the number of keys of an absorbed kernel's loop iteration."""
    if pays_to_expand(batch):
        num_seqs = num_tokens = batch.num_decodes
        prompts = expand(batch, num_heads, head_dim)
    else:
        num_seqs, num_tokens, prompts = batch.num_seqs, batch.num_tokens, None
    singles = prompts is not None or batch.max_query_len <= 1
    heads = next_power_of_2(num_heads)
    if singles:
        rows = max(LEAST_ROWS, min(heads, absorbed_hopper.NARROW_ROWS))
        tiles = WorkTiles(rows, rows, tile or TILE)
    else:
        wide_tile = absorbed_hopper.WIDE_TILE if is_hopper(batch.seq_lens.device) else TILE
        tiles = WorkTiles(MOST_ROWS, min(heads, MOST_ROWS), tile or wide_tile)
    work = plan_work(batch, num_seqs, num_tokens, tiles, num_heads, singles=singles) if num_seqs else None
    return dataclasses.replace(batch, prepared=MLAPlans(work, num_tokens, prompts))


def mla_attention(
    q: Tensor, kv: Tensor, layer: int, batch: AttentionBatch, up: UpProjection, *, scale: float
) -> Tensor:
    """See `baton.kernels.mla.mla_attention`."""
    prepared = batch.prepared
    assert isinstance(prepared, MLAPlans), "the batch of a GPU's step comes from prepare()"
    out = q.new_empty(*q.shape[:2], up.value_dim)
    if prepared.absorbed is not None:
        first = prepared.num_absorbed_tokens
        _absorbed_attention(q[:first], kv, layer, batch, prepared.absorbed, up, scale=scale, out=out[:first])
    if prepared.prompts is not None:
        expanded_attention(q, kv, layer, prepared.prompts, up, scale=scale, out=out)
    return out


def _absorbed_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    work: WorkList,
    up: UpProjection,
    *,
    scale: float,
    out: Tensor,
) -> None:
    q_nope, q_rope = q[..., : up.nope_dim], q[..., up.nope_dim :]
    q_latent = head_products.absorb(up, q_nope)
    results = PartialResults.empty(q_latent, work)
    kernel = absorbed_hopper if absorbed_hopper.serves(q_latent, q_rope, kv, work.tiles) else absorbed
    kernel.latent_attention(q_latent, q_rope, kv, layer, batch, work, scale=scale, results=results)
    head_products.values(up, results, batch, work, out)
