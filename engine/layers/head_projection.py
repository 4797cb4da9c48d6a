"""The projection of hidden states to heads: queries, keys and values, and gates in some families."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.parallel.groups import Group, ParallelGroups
from baton.kernels.linear import RowNorm

from .base import Share
from .linear import MergedLinear


class Heads(NamedTuple):
    """The heads of T tokens on this rank, [T, number of heads, width]."""

    q: Tensor
    k: Tensor  # [T, 0, width] in a layer that reads another layer's cache
    v: Tensor
    gate: Tensor | None  # of each head's output, before the sigmoid


class HeadProjection(MergedLinear):
    """One matrix for the heads of a layer, in the order q, k, v. `AttentionForm` says how checkpoints store it.

    A layer that reads another layer's cache (`ModelConfig.kv_source`) has no keys and values. Values without a
    projection are copies of the keys (`HeadShape.projects_values`).
    """

    def __init__(self, config: ModelConfig, layer: int, in_features: int | None = None) -> None:
        """`in_features` is the width of the input, by default the model's hidden size."""
        form, shape = config.rules.attention, config.heads_of(layer)
        self.num_heads, self.num_kv_heads = config.num_heads, shape.num_kv_heads  # of this rank
        self.head_dim, self.value_dim = shape.key_dim, shape.value_dim
        self.has_keys = config.kv_source(layer) == layer
        self._has_values = self.has_keys and shape.projects_values
        self._q_parts = 1 + form.gated  # of each head in q_proj: the query, and its gate
        parts = {"q_proj": self._q_parts * self.num_heads * self.head_dim}
        if self.has_keys:
            parts["k_proj"] = self.num_kv_heads * self.head_dim
        if self._has_values:
            parts["v_proj"] = self.num_kv_heads * self.value_dim
        self._merged = form.merged
        if form.merged:
            parts = {"qkv_proj": sum(parts.values())}
        assert not form.interleaved or (form.qk_norm is None and not form.gated), "norms and gates have no other order"
        self._rotated_pairs = config.rotation(layer).dim // 2 if form.interleaved else 0  # neighbours until `finish`
        bias = config.attention_bias if form.qkv_bias is None else form.qkv_bias
        super().__init__(in_features or config.hidden_size, parts, bias=bias)

    def divide(self, groups: ParallelGroups) -> None:
        """Divide the heads over the ranks, in order. With fewer KV heads than ranks, several ranks share a KV head."""
        heads, kv_heads = Share.part(self.num_heads, groups.tp), shared_heads(self.num_kv_heads, groups.tp)
        shares = {
            "q_proj": heads.times(self._q_parts * self.head_dim),
            "k_proj": kv_heads.times(self.head_dim),
            "v_proj": kv_heads.times(self.value_dim),
        }
        if self._merged:
            shares = {"qkv_proj": Share.of_sections(list(shares.values()))}
        self.keep_parts({name: shares[name] for name in self.parts})
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size

    def finish(self) -> None:
        if self._rotated_pairs:
            self.reorder_rows(self._halves_apart().to(self.weights["weight"].data.device))
        super().finish()

    def heads(self, hidden: Tensor, *, norm: RowNorm | None = None) -> Heads:
        """Return the heads of hidden states [T, in_features], which go through `norm` first."""
        q_width = self._q_parts * self.num_heads * self.head_dim
        k_width = self.has_keys * self.num_kv_heads * self.head_dim
        v_width = self._has_values * self.num_kv_heads * self.value_dim
        q, k, v = self(hidden, norm=norm).split([q_width, k_width, v_width], dim=1)
        q, k, gate = q.unflatten(1, (-1, self.head_dim)), k.unflatten(1, (-1, self.head_dim)), None
        if self._q_parts > 1:
            q, gate = (part.squeeze(2) for part in q.unflatten(1, (-1, 2)).split(1, dim=2))
            q = q.contiguous()
        if self._has_values:
            v = v.unflatten(1, (-1, self.value_dim))
        else:
            v = k.clone() if self.has_keys else k
        return Heads(q, k, v, gate)

    def _halves_apart(self) -> Tensor:
        """Return an order of the outputs in which dimensions that are rotated together lie half of those apart."""
        rows = torch.arange(self.out_features)
        rotated = self.num_heads + self.has_keys * self.num_kv_heads  # the heads of queries, then those of keys
        heads = rows[: rotated * self.head_dim].view(rotated, self.head_dim)[:, : 2 * self._rotated_pairs]
        heads.copy_(torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1))
        return rows


def shared_heads(count: int, group: Group) -> Share:
    """Return the KV heads that this rank's query heads read. If there are fewer than ranks, several ranks share one."""
    return Share(group.rank * count // group.size, max(1, count // group.size), count)
