"""The definition of paged attention: one sequence at a time, with the full matrix of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.kv_rows import kv_rows

from .rule import AttentionRule


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    rule: AttentionRule,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See `baton.kernels.attention.paged_attention`. Computes in float32 (float64 if `q` is)."""
    value_dim = kv_rows(kv, q.shape[2]).value_dim
    out = q.new_empty((*q.shape[:2], value_dim)) if out is None else out
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    num_kv_heads, block_size = kv.shape[1], kv.shape[4]
    group = q.shape[1] // num_kv_heads
    starts, seq_lens = batch.query_start.tolist(), batch.seq_lens.tolist()
    rows = range(len(seq_lens)) if batch.table_rows is None else batch.table_rows.tolist()
    out[starts[-1] :] = 0
    for index, (row, seq_len) in enumerate(zip(rows, seq_lens, strict=True)):
        tokens = slice(starts[index], starts[index + 1])
        if seq_len == 0:
            out[tokens] = 0
            continue
        first_query = seq_len - (starts[index + 1] - starts[index])
        oldest = 0 if rule.window is None else max(0, first_query + 1 - rule.window)  # the first key that a query sees
        read = slice(oldest // block_size, -(-seq_len // block_size))
        blocks = kv[batch.block_tables[row, read].long(), :, layer].to(compute_dtype)
        # [block, kv_head, planes, token, width] -> [planes, head, key, width]
        first_key = read.start * block_size
        planes = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, : seq_len - first_key]
        planes = planes.repeat_interleave(group, dim=1)
        keys, values = planes if len(planes) == 2 else planes[0].split([q.shape[2], value_dim], dim=-1)
        keys = keys if rule.k_scale is None else keys * rule.k_scale
        values = values if rule.v_scale is None else values * rule.v_scale
        scores = q[tokens].to(compute_dtype).transpose(0, 1) @ keys.transpose(1, 2) * rule.scale
        scores = scores if rule.soft_cap is None else rule.soft_cap * torch.tanh(scores / rule.soft_cap)
        distance = batch.positions[tokens, None] - torch.arange(first_key, seq_len, device=q.device)
        visible = distance >= 0
        if rule.window is not None:
            visible &= distance < rule.window
        scores = scores.masked_fill(~visible, float("-inf"))
        if rule.sinks is not None:
            sinks = rule.sinks.to(compute_dtype)[:, None, None].expand_as(scores[..., :1])
            scores = torch.cat([sinks, scores], dim=-1)
        weights = scores.softmax(-1)[..., 0 if rule.sinks is None else 1 :]
        out[tokens] = (weights @ values).transpose(0, 1).to(out.dtype)
    return out
