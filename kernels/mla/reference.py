"""Reference of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch

from .up_projection import UpProjection


def latent_and_cache(
    q_rope: Tensor,
    compressed: Tensor,
    norm: Tensor,
    cos_sin: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    *,
    eps: float,
) -> None:
    """See `baton.kernels.mla.latent_and_cache`. Computes in float32 (float64 if `compressed` is), rounds once."""
    compute_dtype = torch.promote_types(compressed.dtype, torch.float32)
    cos, sin = cos_sin[batch.positions].to(compute_dtype).chunk(2, dim=-1)
    latent, k_rope = compressed.to(compute_dtype).split([norm.shape[0], q_rope.shape[2]], dim=-1)
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + eps) * norm.to(compute_dtype)
    kept = batch.slots >= 0
    slots, block_size = batch.slots[kept], kv.shape[4]
    both = torch.cat([latent, _rotate(k_rope, cos, sin)], dim=-1)
    kv[slots // block_size, 0, layer, 0, slots % block_size] = both[kept].to(kv.dtype)
    q_rope.copy_(_rotate(q_rope.to(compute_dtype), cos[:, None], sin[:, None]))


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
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    keys_up, values_up = up.by_head.to(compute_dtype).split([up.nope_dim, up.value_dim], dim=1)
    out = torch.zeros(*q.shape[:2], up.value_dim, dtype=q.dtype, device=q.device)
    for tokens, cached in sequences(kv, layer, batch, compute_dtype):
        latent, k_rope = cached.split([up.rank, q.shape[2] - up.nope_dim], dim=-1)
        q_nope, q_rope = q[tokens].transpose(0, 1).to(compute_dtype).split([up.nope_dim, k_rope.shape[1]], dim=-1)
        scores = (q_nope @ (latent @ keys_up.transpose(1, 2)).transpose(1, 2) + q_rope @ k_rope.T) * scale
        visible = batch.positions[tokens, None] >= torch.arange(len(cached), device=q.device)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[tokens] = (weights @ (latent @ values_up.transpose(1, 2))).transpose(0, 1).to(out.dtype)
    return out


def sequences(kv: Tensor, layer: int, batch: AttentionBatch, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield the tokens of each sequence in the step, and what the cache has of it: [seq_len, rank + rope]."""
    starts, seq_lens = batch.query_start.tolist(), batch.seq_lens.tolist()
    rows = range(batch.num_seqs) if batch.table_rows is None else batch.table_rows.tolist()
    for index, (row, seq_len) in enumerate(zip(rows, seq_lens, strict=True)):
        if seq_len:
            blocks = batch.block_tables[row, : -(-seq_len // kv.shape[4])].long()
            yield slice(starts[index], starts[index + 1]), kv[blocks, 0, layer, 0].flatten(0, 1)[:seq_len].to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate dimensions 2i and 2i + 1 as a pair."""
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
