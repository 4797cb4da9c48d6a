"""Multi-head latent attention on a GPU: the choice between its two forms for the tokens of a step.

    absorbed    queries are projected to the space of latents, which are both keys and values: for decodes, short
                chunks, and everything in a captured graph
                                                         work_list, head_gemv, absorbed or absorbed_hopper, combine
    expanded    keys and values of every head are computed from latents, once for all queries of a long chunk
                                                         expanded, dense or dense_hopper

`latent_cache` norms and rotates latents, and writes them to the KV cache.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import triton
from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch

from ..up_projection import UpProjection
from . import absorbed, absorbed_hopper, head_gemv
from .expanded import ExpandedPrompts, expand, expanded_attention, pays_to_expand
from .latent_cache import latent_and_cache
from .work_list import WorkList, WorkTiles, plan_work

__all__ = ["latent_and_cache", "mla_attention", "prepare"]

LEAST_ROWS, MOST_ROWS = 16, 64  # the least that a matrix product needs; the most whose sums fit in registers
TILE = 64  # keys


@dataclass(frozen=True)
class Absorbed:
    """A work list for the absorbed kernels, for sequences with one query token, or for those with several.

    A program's rows are the heads of one token, or of as many tokens of a sequence as fit.
    """

    work: WorkList
    tiles: WorkTiles


@dataclass(frozen=True)
class MLAPlans:
    """The work of one step, shared by its layers."""

    absorbed: tuple[Absorbed, ...]
    num_absorbed_tokens: int  # the step's first tokens are absorbed; the others belong to `prompts`
    prompts: ExpandedPrompts | None


def prepare(batch: AttentionBatch, *, num_heads: int, head_dim: int, tile: int = TILE) -> AttentionBatch:
    """See `baton.kernels.mla.prepare`. `tile` is the number of keys of an absorbed kernel's loop iteration."""
    heads = triton.next_power_of_2(num_heads)
    rows = max(LEAST_ROWS, min(heads, absorbed_hopper.NARROW_ROWS.value))
    singles = WorkTiles(rows, rows, tile)
    if pays_to_expand(batch):
        parts = [_absorbed(batch, batch.num_decodes, singles, num_heads, singles=True)] if batch.num_decodes else []
        prepared = MLAPlans(tuple(parts), batch.num_decodes, expand(batch, num_heads, head_dim))
    else:
        parts = [_absorbed(batch, batch.num_seqs, singles, num_heads, singles=True)]
        if batch.max_query_len > 1:
            chunks = WorkTiles(MOST_ROWS, min(heads, MOST_ROWS), tile)
            parts.append(_absorbed(batch, batch.num_seqs, chunks, num_heads, singles=False))
        prepared = MLAPlans(tuple(parts), batch.num_tokens, None)
    return dataclasses.replace(batch, prepared=prepared)


def mla_attention(
    q: Tensor, kv: Tensor, layer: int, batch: AttentionBatch, up: UpProjection, *, scale: float
) -> Tensor:
    """See `baton.kernels.mla.mla_attention`."""
    prepared = batch.prepared
    assert isinstance(prepared, MLAPlans), "the batch of a GPU's step comes from prepare()"
    out = q.new_empty(*q.shape[:2], up.value_dim)
    num_absorbed = prepared.num_absorbed_tokens
    if num_absorbed:
        first = q[:num_absorbed]
        q_latent = head_gemv.absorb(up, first[..., : up.nope_dim])
        attended = q.new_empty(num_absorbed, q.shape[1], up.rank)
        for index, part in enumerate(prepared.absorbed):
            q_rope = first[..., up.nope_dim :]
            kernel = absorbed_hopper if absorbed_hopper.serves(q_latent, q_rope, kv, part.tiles) else absorbed
            kernel.latent_attention(
                q_latent,
                q_rope,
                kv,
                layer,
                batch,
                part.work,
                part.tiles,
                scale=scale,
                out=attended,
                pads=index == len(prepared.absorbed) - 1,  # the last list has items for all tokens, padding included
            )
        head_gemv.values(up, attended, out[:num_absorbed])
    if prepared.prompts is not None:
        expanded_attention(q, kv, layer, prepared.prompts, up, scale=scale, out=out)
    return out


def _absorbed(batch: AttentionBatch, num_seqs: int, tiles: WorkTiles, num_heads: int, *, singles: bool) -> Absorbed:
    return Absorbed(plan_work(batch, num_seqs, tiles, num_heads, singles=singles), tiles)
