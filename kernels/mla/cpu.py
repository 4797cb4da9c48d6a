"""Multi-head latent attention on a CPU, in tiles of 16 queries that begin at positions 0, 16, 32, ...

    positions    0 ... 15 | 16 ... 31 | 32 ... 47           a decode at position 40: tile 32 ... 47, 48 keys
    tile             16         32         48  keys         other rows of the tile, and keys behind 40, are zeros

All products of a tile have the same sizes, whichever of its tokens are in the step. So the result of a token has the
same bits however its prompt is cut, and with drafts behind it or without. Latents are read as they are (*absorbed*):
the query is multiplied by the keys' projection, and the sum of latents by that of the values, so that a decode expands
no key or value of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.attention_batch import AttentionBatch

from . import reference
from .up_projection import UpProjection

TILE = 16


def mla_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    up: UpProjection,
    *,
    scale: float,
) -> Tensor:
    """See `baton.kernels.mla.mla_attention`. Computes in float32 (float64 if `q` is) and rounds once."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    by_head = up.by_head.to(dtype)
    unseen = torch.full((TILE, TILE), float("-inf"), dtype=dtype).triu(1)  # a tile's keys behind each of its queries
    out = torch.zeros(*q.shape[:2], up.value_dim, dtype=q.dtype)
    for tokens, cached in reference.sequences(kv, layer, batch, dtype):
        keys = functional.pad(cached, (0, 0, 0, -len(cached) % TILE))
        first, end = tokens.start, len(cached)
        position = end - (tokens.stop - first)
        while position < end:
            start = position // TILE * TILE
            last = min(end, start + TILE)
            chosen = slice(first, first + last - position)
            tile = functional.pad(q[chosen].to(dtype), (0, 0, 0, 0, position - start, start + TILE - last))
            attended = _attend(tile, keys[: start + TILE], unseen, by_head, up, scale)
            out[chosen] = attended[position - start : last - start].to(out.dtype)
            first, position = chosen.stop, last
    return out


def _attend(q: Tensor, keys: Tensor, unseen: Tensor, by_head: Tensor, up: UpProjection, scale: float) -> Tensor:
    """Compute the last queries q [16, H, nope + rope] of a sequence with `keys` [S, rank + rope] -> [16, H, value].

    `unseen` [16, 16] is added to their scores with the last 16 keys.
    """
    keys_up, values_up = by_head.split([up.nope_dim, up.value_dim], dim=1)
    absorbed = torch.cat(
        (q[..., : up.nope_dim].transpose(0, 1) @ keys_up, q[..., up.nope_dim :].transpose(0, 1)), dim=2
    )
    scores = (absorbed.flatten(0, 1) @ keys.T * scale).unflatten(0, (-1, TILE))
    scores[:, :, -TILE:] += unseen
    attended = scores.softmax(-1).flatten(0, 1) @ keys[:, : up.rank]
    return (attended.unflatten(0, (-1, TILE)) @ values_up.transpose(1, 2)).transpose(0, 1)
