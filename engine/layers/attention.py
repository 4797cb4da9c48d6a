"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from baton.engine.core.layout import CachePlace
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.parallel.groups import ALONE, Group, ParallelGroups
from baton.kernels.activation import gate_heads
from baton.kernels.attention import AttentionBatch, AttentionRule, paged_attention, prepare
from baton.kernels.linear import RowNorm
from baton.kernels.rms_norm import rms_norm
from baton.kernels.rope_kv import rope_and_cache
from baton.kernels.state_batch import StateBatch

from .base import Layer, Parameter, Share, rows_at
from .fp8 import ScalarScale
from .linear import Linear, MergedLinear
from .norm import RMSNorm, norms_over_ranks


@dataclass(frozen=True)
class GroupCache:
    """One cache group in a step: its KV cache, and the step's batch with this group's block tables."""

    batch: AttentionBatch
    kv: Tensor  # [num_blocks, num_kv_heads, layers of the group, planes, block_size, width], see `core.layout`


@dataclass(frozen=True)
class StateCache:
    """One cache group of recurrent layers in a step: its slots, and the batch that maps sequences to slots."""

    batch: StateBatch
    slots: Tensor  # bytes [num_slots, slot_bytes], see `core.layout.StateLayout`
    drafts: Tensor | None = (
        None  # bytes [places, place_bytes], see `ModelConfig.draft_inputs`; None: decodes have no drafts
    )


@dataclass(frozen=True)
class LayerContext:
    """A step's inputs that every layer reads, apart from the hidden states."""

    caches: tuple[GroupCache | StateCache, ...]  # one for each cache group
    # For each of `ModelConfig.rotations`, cosines and sines of all positions: see `layers.rotary.cos_sin_table`.
    cos_sin: tuple[Tensor, ...]
    query_factors: Tensor | None = None  # [T, 1, 1], of queries: see `hf_config.rope.QueryGrowth`; None: all are 1
    rows_of_ranks: tuple[int, ...] | None = None  # see `TokenRows.of_ranks`
    layer_inputs: Tensor | None = None  # see `TokenRows.layer_inputs`

    @property
    def slots(self) -> Tensor:
        """The slot of each token's keys and values in the first group, int64 [T]; -1 marks padding."""
        return self.kv_at(CachePlace(0, 0)).batch.slots

    def kv_at(self, place: CachePlace) -> GroupCache:
        cache = self.caches[place.group]
        assert isinstance(cache, GroupCache), "this group keeps states"
        return cache

    def states_at(self, place: CachePlace) -> StateCache:
        cache = self.caches[place.group]
        assert isinstance(cache, StateCache), "this group keeps keys and values"
        return cache


class TokenMixer(Layer, abc.ABC):
    """The part of a decoder layer that mixes the tokens of a sequence."""

    window: int | None = None  # number of keys that a query sees, its own included; None: all up to its own
    rotary_dim: int = 0  # the number of dimensions of a head that are rotated
    place: CachePlace  # the layer's cache: the cache group, and the layer's index in it

    @abc.abstractmethod
    def __call__(
        self,
        hidden: Tensor,
        context: LayerContext,
        wanted: Tensor | None = None,
        *,
        norm: RowNorm | None = None,
        add_to: Tensor | None = None,
    ) -> Tensor:
        """Return the output [T, hidden_size] for hidden [T, hidden_size], or [R, hidden_size] for the `wanted` tokens.

        `hidden` goes through `norm` first, if given. With `add_to`, the sum of `add_to` and the output is returned; the
        addition is in place unless the layer is divided over ranks. The keys, values or states of all T tokens are
        written to the layer's cache, whatever `wanted` is.
        """
        ...


class SelfAttention(TokenMixer):
    """A mixer with a cache entry for each token: keys and values, or a latent."""

    num_heads: int  # query heads on this rank
    num_kv_heads: int  # KV heads in this rank's cache

    @abc.abstractmethod
    def prepare(self, cache: GroupCache) -> AttentionBatch:
        """Return the batch with the kernels' plan for this step. All layers of the cache group share it."""
        ...


class Attention(SelfAttention):
    """Projections, rotation, the KV write and attention of one decoder layer.

    qk_norm     "head": RMSNorm of every query and key head before the rotation
                "width": RMSNorm of all query heads together, and of all key heads
    sinks       each query head has a learnt extra score in the softmax, without a key or a value
    v_norm      RMSNorm without weights of every value head
    merged      the checkpoint has the projections of queries, keys and values in one tensor, `qkv_proj`
    interleaved  neighbouring dimensions of a head are rotated together, where otherwise dimensions half of the rotated
                ones apart are; then those of queries and keys are reordered once they are loaded, as the kernels need
    gated       `q_proj` also gives a gate for each query head, right after the query; the head's output is multiplied
                by the gate's sigmoid

    If `config.kv_source(layer)` is another layer, this one projects queries only and reads that layer's cache. Scores
    are scaled and capped as `config.scales` says. `output_multiplier` is multiplied into the weights of `o_proj` once
    they are loaded.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: Literal["head", "width"] | None = None,
        v_norm: bool = False,
        sinks: bool = False,
        gated: bool = False,
        merged: bool = False,
        interleaved: bool = False,
        output_multiplier: float = 1.0,
        in_features: int | None = None,
    ) -> None:
        """`in_features` is the width of the input, by default the model's hidden size."""
        shape = config.heads_of(layer)
        heads, kv_heads, dim, value_dim = config.num_heads, shape.num_kv_heads, shape.key_dim, shape.value_dim
        self._q_parts = 1 + gated  # of each head in q_proj: the query, and its gate
        parts = {"q_proj": self._q_parts * heads * dim}
        self._source = config.kv_source(layer)  # the layer whose keys and values it reads
        self._has_keys = self._source == layer
        self._has_values = self._has_keys and shape.projects_values
        if self._has_keys:
            parts["k_proj"] = kv_heads * dim
        if self._has_values:
            parts["v_proj"] = kv_heads * value_dim
        self._merged = merged
        if merged:
            parts = {"qkv_proj": sum(parts.values())}
        assert not interleaved or (qk_norm is None and not gated), "norms and gates would have to be reordered, too"
        self._interleaved = interleaved
        self.qkv_proj = MergedLinear(in_features or config.hidden_size, parts, bias=qkv_bias)
        self.o_proj = Linear(heads * value_dim, config.hidden_size, bias=output_bias)
        # Factors of the cached keys and values; None: no factors.
        self.k_scale = ScalarScale() if config.cache_scales else None
        self.v_scale = ScalarScale() if config.cache_scales else None
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm is not None:
            q_width, k_width = (dim, dim) if qk_norm == "head" else (heads * dim, kv_heads * dim)
            offset = config.rules.norm_offset
            self.q_norm = RMSNorm(q_width, config.rms_norm_eps, offset=offset)
            self.k_norm = RMSNorm(k_width, config.rms_norm_eps, offset=offset) if self._has_keys else None
        self.sinks = Parameter(heads, dtype=torch.float32) if sinks else None
        self.place = config.caches.place_of(self._source)
        self.window = config.layer_windows[layer]
        self.scale = dim**-0.5 if config.scales.score is None else config.scales.score
        self.soft_cap = config.scales.score_cap
        self.eps = config.rms_norm_eps
        self.num_heads, self.num_kv_heads = heads, kv_heads  # of this rank
        self._head_dim, self._value_dim = dim, value_dim
        rotation = config.rotation(layer)
        self.rotary_dim = rotation.dim
        self._rotation = config.rotations.index(rotation)
        self._norms_width = qk_norm == "width"
        self._norms_values = v_norm
        self._ones: Tensor | None = None  # weights of the norm of values
        self._output_multiplier = output_multiplier
        self._group: Group = ALONE  # the ranks that the heads are divided over
        self._rule: AttentionRule | None = None

    def divide(self, groups: ParallelGroups) -> None:
        """Divide the heads over the ranks, in order. With fewer KV heads than ranks, several ranks share a KV head."""
        heads, kv_heads = Share.part(self.num_heads, groups.tp), shared_heads(self.num_kv_heads, groups.tp)
        q, k, v = heads.times(self._head_dim), kv_heads.times(self._head_dim), kv_heads.times(self._value_dim)
        shares = {"q_proj": heads.times(self._q_parts * self._head_dim), "k_proj": k, "v_proj": v}
        if self._merged:
            shares = {"qkv_proj": Share.of_sections(list(shares.values()))}
        self.qkv_proj.keep_parts({name: shares[name] for name in self.qkv_proj.parts})
        self.o_proj.keep_columns(heads.times(self._value_dim), groups.tp)
        if self.sinks is not None:
            self.sinks.keep(0, heads)
        if self._norms_width and self.q_norm is not None and self.k_norm is not None:
            self.q_norm.weight.keep(0, q)
            self.k_norm.weight.keep(0, k)
        self._group = groups.tp
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size

    def prepare(self, cache: GroupCache) -> AttentionBatch:
        return prepare(cache.batch, cache.kv, num_heads=self.num_heads, head_dim=self._head_dim)

    def finish(self) -> None:
        if self._interleaved:
            self.qkv_proj.reorder_rows(self._halves_apart().to(self.qkv_proj.weights["weight"].data.device))
        self.o_proj.multiply_rows([(self.o_proj.out_features, self._output_multiplier)])
        super().finish()
        if self._norms_values:
            assert self.q_norm is not None, "models norm values where they norm queries"
            self._ones = torch.ones_like(self.q_norm.weight.data)
        self._rule = AttentionRule(
            self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else self.sinks.data,
            k_scale=None if self.k_scale is None else self.k_scale.data,
            v_scale=None if self.v_scale is None else self.v_scale.data,
        )

    def __call__(
        self,
        hidden: Tensor,
        context: LayerContext,
        wanted: Tensor | None = None,
        *,
        norm: RowNorm | None = None,
        add_to: Tensor | None = None,
    ) -> Tensor:
        cache, index, rule = context.kv_at(self.place), self.place.index, self._rule
        batch, kv = cache.batch, cache.kv
        assert rule is not None, "finish() comes before the first call"
        q, k, v = self._heads(self.qkv_proj(hidden, norm=norm))
        gate = None
        if self._q_parts > 1:
            q, gate = (part.squeeze(2) for part in q.unflatten(1, (-1, 2)).split(1, dim=2))
            q = q.contiguous()
        if context.query_factors is not None:
            q = q * context.query_factors
        q_norm = k_norm = None
        if self.q_norm is not None:
            if self._norms_width and self.k_norm is not None:
                normed = norms_over_ranks([(self.q_norm, q.flatten(1)), (self.k_norm, k.flatten(1))], self._group)
                q, k = (part.unflatten(1, (-1, self._head_dim)) for part in normed)
            else:
                q_norm = self.q_norm.weight.data
                k_norm = None if self.k_norm is None else self.k_norm.weight.data
        q = rope_and_cache(
            q,
            k,
            v,
            context.cos_sin[self._rotation],
            kv,
            index,
            batch,
            rotary_dim=self.rotary_dim,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self.eps,
            k_scale=rule.k_scale,
            v_scale=rule.v_scale,
        )
        out = paged_attention(q, kv, index, batch, rule)
        if gate is not None:
            gate_heads(out, gate)
        out = out.flatten(1)
        return self.o_proj(out if wanted is None else rows_at(out, wanted), add_to=add_to)

    def _halves_apart(self) -> Tensor:
        """Return an order of the outputs in which dimensions that are rotated together lie half of those apart."""
        rows = torch.arange(self.qkv_proj.out_features)
        rotated = self.num_heads + self._has_keys * self.num_kv_heads  # the heads of queries, then those of keys
        heads = rows[: rotated * self._head_dim].view(rotated, self._head_dim)[:, : self.rotary_dim]
        heads.copy_(torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1))
        return rows

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the heads of q (each followed by its gate, if the layer is gated), k and v, [T, heads, dim].

        Without a projection of values, they are copies of the keys. A layer that reads another layer's cache has no
        heads of k and v.
        """
        dim, value_dim = self._head_dim, self._value_dim
        keys, values = self._has_keys * self.num_kv_heads * dim, self._has_values * self.num_kv_heads * value_dim
        q, k, v = qkv.split([self._q_parts * self.num_heads * dim, keys, values], dim=1)
        q, k = q.unflatten(1, (-1, dim)), k.unflatten(1, (-1, dim))
        if not self._has_keys:
            return q, k, k
        v = v.unflatten(1, (-1, value_dim)) if self._has_values else k.clone()
        return q, k, v if self._ones is None else self._normed_values(v)

    def _normed_values(self, values: Tensor) -> Tensor:
        assert self._ones is not None, "finish() comes before the first call"
        normed = rms_norm(values.contiguous(), self._ones, self.eps)
        assert isinstance(normed, Tensor)
        return normed


def shared_heads(count: int, group: Group) -> Share:
    """Return the KV heads that this rank's query heads read. If there are fewer than ranks, several ranks share one."""
    return Share(group.rank * count // group.size, max(1, count // group.size), count)
