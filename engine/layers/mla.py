"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) over a paged cache of latents.

hidden ──q_proj | q_a_proj, norm, q_b_proj──> q [T, heads, nope + rope] ────────rotate────> attention ──o_proj──>
hidden ──kv_a_proj_with_mqa──> latent [T, rank] ──norm──┐                                      ^
                               rope   [T, rope] ─rotate─┴─> cache        kv_b_proj [heads, nope + value, rank]
"""

from __future__ import annotations

import math

from torch import Tensor

from baton.engine.hf_config.attention import LatentShape
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.hf_config.rope import Rope, YarnRope
from baton.engine.parallel.groups import ParallelGroups
from baton.kernels.attention import AttentionBatch
from baton.kernels.linear import RowNorm
from baton.kernels.mla import UpProjection, latent_and_cache, mla_attention, prepare

from .base import Layer, Parameter, Share
from .linear import Linear, MergedLinear
from .norm import RMSNorm
from .step_context import GroupCache, LayerContext, rows_at
from .token_mixer import SelfAttention

LATENT_NORM_EPS = 1e-6  # not the config's epsilon, which is for the other norms


class KeyValueUp(Layer):
    """`kv_b_proj`, from latents to every head's keys and values. The attention kernels read its weight themselves."""

    def __init__(self, num_heads: int, shape: LatentShape) -> None:
        self.weight = Parameter(num_heads * (shape.nope_dim + shape.value_dim), shape.rank)
        self._num_heads = num_heads
        self._shape = shape

    def keep_heads(self, share: Share) -> None:
        """Hold only these heads here."""
        self.weight.keep(0, share.times(self._shape.nope_dim + self._shape.value_dim))
        self._num_heads = share.size

    def __call__(self) -> UpProjection:
        return UpProjection(self.weight.data, self._num_heads, self._shape.nope_dim, self._shape.value_dim)


class LatentAttention(SelfAttention):
    """Projections, norms, rotation, the write to the KV cache and attention of one decoder layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        shape = config.latent
        assert shape is not None, "a config without latents has no latent attention"
        heads, bias = config.num_heads, config.attention_bias
        down = {"kv_a_proj_with_mqa": shape.rank + shape.rope_dim}
        self.q_b_proj: Linear | None = None
        if shape.q_rank is None:
            self.down_proj = MergedLinear(config.hidden_size, {"q_proj": heads * shape.head_dim, **down}, bias=bias)
        else:
            self.down_proj = MergedLinear(config.hidden_size, {"q_a_proj": shape.q_rank, **down}, bias=bias)
            self.q_a_layernorm = RMSNorm(shape.q_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(shape.q_rank, heads * shape.head_dim)
        self.kv_a_layernorm = RMSNorm(shape.rank, LATENT_NORM_EPS)
        self.kv_b_proj = KeyValueUp(heads, shape)
        self.o_proj = Linear(heads * shape.value_dim, config.hidden_size, bias=bias)
        self.place = config.caches.place_of(layer)
        self.scale = score_scale(shape, config.rope)
        self.num_heads, self.num_kv_heads = heads, 1
        self._shape = shape
        self._rotation = config.rotations.index(config.rotation(layer))

    def divide(self, groups: ParallelGroups) -> None:
        """Divide the heads over the ranks, in order. Every rank computes and caches the latents."""
        heads = Share.part(self.num_heads, groups.tp)
        queries = heads.times(self._shape.head_dim)
        if self.q_b_proj is None:
            self.down_proj.keep_parts({"q_proj": queries})
        else:
            self.q_b_proj.keep_rows(queries)
        self.kv_b_proj.keep_heads(heads)
        self.o_proj.keep_columns(heads.times(self._shape.value_dim), groups.tp)
        self.num_heads = heads.size

    def prepare(self, cache: GroupCache) -> AttentionBatch:
        return prepare(cache.batch, num_heads=self.num_heads, head_dim=self._shape.head_dim)

    def __call__(
        self,
        hidden: Tensor,
        context: LayerContext,
        wanted: Tensor | None = None,
        *,
        norm: RowNorm | None = None,
        add_to: Tensor | None = None,
    ) -> Tensor:
        shape, cache, index = self._shape, context.kv_at(self.place), self.place.index
        batch, kv = cache.batch, cache.kv
        down = self.down_proj(hidden, norm=norm)
        q, compressed = down.split([down.shape[1] - shape.rank - shape.rope_dim, shape.rank + shape.rope_dim], dim=1)
        if self.q_b_proj is not None:
            q = self.q_b_proj(q, norm=self.q_a_layernorm.of_rows)
        q = q.unflatten(1, (-1, shape.head_dim))
        kv_norm = self.kv_a_layernorm
        latent_and_cache(
            q[..., shape.nope_dim :],
            compressed,
            kv_norm.weight.data,
            context.cos_sin[self._rotation],
            kv,
            index,
            batch,
            eps=kv_norm.eps,
        )
        out = mla_attention(q, kv, index, batch, self.kv_b_proj(), scale=self.scale).flatten(1)
        return self.o_proj(out if wanted is None else rows_at(out, wanted), add_to=add_to)


def score_scale(shape: LatentShape, rope: Rope) -> float:
    """Return the factor of attention scores. It includes YaRN's temperature if the config has `mscale_all_dim`."""
    scale = shape.head_dim**-0.5
    if isinstance(rope, YarnRope) and rope.mscale_all_dim:
        scale *= (0.1 * rope.mscale_all_dim * math.log(max(rope.factor, 1.0)) + 1.0) ** 2
    return scale
