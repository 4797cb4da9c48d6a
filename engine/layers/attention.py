"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.hf_config.attention import QKNorm, Sinks
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.parallel.groups import ALONE, Group, ParallelGroups
from baton.kernels.activation import gate_heads
from baton.kernels.attention import AttentionBatch, AttentionRule, paged_attention, prepare
from baton.kernels.linear import RowNorm
from baton.kernels.rms_norm import rms_norm
from baton.kernels.rope_kv import rope_and_cache

from .base import Parameter, Share
from .fp8 import ScalarScale
from .head_projection import HeadProjection, shared_heads
from .linear import Linear
from .norm import RMSNorm, norms_over_ranks
from .step_context import GroupCache, LayerContext, rows_at
from .token_mixer import SelfAttention


class Attention(SelfAttention):
    """Projections, norms, rotation, the KV write and attention of one decoder layer.

    `config.rules.attention` says which of these a family has, and how they are stored; `config` gives the layer's
    heads, window, rotation and factors. If `config.kv_source(layer)` is another layer, this one projects queries only
    and reads that layer's cache.
    """

    def __init__(self, config: ModelConfig, layer: int, *, in_features: int | None = None) -> None:
        """`in_features` is the width of the input, by default the model's hidden size."""
        form, shape, source = config.rules.attention, config.heads_of(layer), config.kv_source(layer)
        self.qkv_proj = HeadProjection(config, layer, in_features)
        bias = config.attention_bias if form.output_bias is None else form.output_bias
        self.o_proj = Linear(config.num_heads * shape.value_dim, config.hidden_size, bias=bias)
        self._output_factor = config.scales.attention_output
        # Factors of the cached keys and values; None: no factors.
        self.k_scale = ScalarScale() if config.cache_scales else None
        self.v_scale = ScalarScale() if config.cache_scales else None
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self._norms_width = config.qk_norm is QKNorm.WIDTH
        if config.qk_norm is not None:
            of_queries, of_keys = (config.num_heads, shape.num_kv_heads) if self._norms_width else (1, 1)
            eps, offset = config.rms_norm_eps, config.rules.norm_offset
            self.q_norm = RMSNorm(of_queries * shape.key_dim, eps, offset=offset)
            if source == layer:
                self.k_norm = RMSNorm(of_keys * shape.key_dim, eps, offset=offset)
        self._norms_values = form.v_norm and source == layer
        self._ones: Tensor | None = None  # weights of the norm of values
        self.window = config.layer_windows[layer]
        has_sinks = form.sinks is Sinks.ALL or (form.sinks is Sinks.WINDOWS and self.window is not None)
        self.sinks = Parameter(config.num_heads, dtype=torch.float32) if has_sinks else None
        self.place = config.caches.place_of(source)
        self.scale = shape.key_dim**-0.5 if config.scales.score is None else config.scales.score
        self.soft_cap = config.scales.score_cap
        self.eps = config.rms_norm_eps
        self.num_heads, self.num_kv_heads = config.num_heads, shape.num_kv_heads  # of this rank
        rotation = config.rotation(layer)
        self.rotary_dim = rotation.dim
        self._rotation = config.rotations.index(rotation)
        self._group: Group = ALONE  # the ranks that the heads are divided over
        self._rule: AttentionRule | None = None

    def divide(self, groups: ParallelGroups) -> None:
        """Divide the heads over the ranks, as `HeadProjection.divide` does."""
        heads, kv_heads = Share.part(self.num_heads, groups.tp), shared_heads(self.num_kv_heads, groups.tp)
        self.qkv_proj.divide(groups)
        self.o_proj.keep_columns(heads.times(self.qkv_proj.value_dim), groups.tp)
        if self.sinks is not None:
            self.sinks.keep(0, heads)
        if self._norms_width and self.q_norm is not None and self.k_norm is not None:
            self.q_norm.weight.keep(0, heads.times(self.qkv_proj.head_dim))
            self.k_norm.weight.keep(0, kv_heads.times(self.qkv_proj.head_dim))
        self._group = groups.tp
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size

    def prepare(self, cache: GroupCache) -> AttentionBatch:
        return prepare(cache.batch, cache.kv, num_heads=self.num_heads, head_dim=self.qkv_proj.head_dim)

    def finish(self) -> None:
        self.o_proj.multiply_rows([(self.o_proj.out_features, self._output_factor)])
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
        q, k, v, gate = self.qkv_proj.heads(hidden, norm=norm)
        if self._ones is not None:
            v = self._normed_values(v, self._ones)
        if context.query_factors is not None:
            q = q * context.query_factors
        if self._norms_width:
            q, k = self._normed_widths(q, k)
        q = rope_and_cache(
            q,
            k,
            v,
            context.cos_sin[self._rotation],
            kv,
            index,
            batch,
            rotary_dim=self.rotary_dim,
            q_norm=self._head_norm(self.q_norm),
            k_norm=self._head_norm(self.k_norm),
            eps=self.eps,
            k_scale=rule.k_scale,
            v_scale=rule.v_scale,
        )
        out = paged_attention(q, kv, index, batch, rule)
        if gate is not None:
            gate_heads(out, gate)
        out = out.flatten(1)
        return self.o_proj(out if wanted is None else rows_at(out, wanted), add_to=add_to)

    def _head_norm(self, norm: RMSNorm | None) -> Tensor | None:
        """Return the weights of a norm of every head, which is computed with the rotation."""
        return None if norm is None or self._norms_width else norm.weight.data

    def _normed_widths(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norms of all query heads together, and of all key heads, on all ranks."""
        assert self.q_norm is not None, "this layer norms queries"
        assert self.k_norm is not None, "such models have keys in all layers"
        normed = norms_over_ranks([(self.q_norm, q.flatten(1)), (self.k_norm, k.flatten(1))], self._group)
        first, second = (part.unflatten(1, (-1, self.qkv_proj.head_dim)) for part in normed)
        return first, second

    def _normed_values(self, values: Tensor, ones: Tensor) -> Tensor:
        normed = rms_norm(values.contiguous(), ones, self.eps)
        assert isinstance(normed, Tensor)
        return normed
