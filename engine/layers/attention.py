"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.engine.model_config import ModelConfig
from baton.kernels.attention import AttentionBatch, paged_attention
from baton.kernels.rope_kv import rope_and_cache

from .base import Layer
from .linear import Linear, MergedLinear
from .norm import RMSNorm


@dataclass(frozen=True)
class LayerContext:
    """What every layer of one step reads beside the hidden states."""

    batch: AttentionBatch
    kv: Tensor  # [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]
    cos_sin: Tensor  # [max_model_len, head_dim] float32, see `layers.rotary`


class Attention(Layer):
    """Projections, rotation, the KV write and attention of one decoder layer.

    A subclass that sets `q_norm` and `k_norm` has every query and key head normed before the rotation.
    """

    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def __init__(self, config: ModelConfig, layer: int, *, qkv_bias: bool = False, output_bias: bool = False) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        parts = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, bias=qkv_bias)
        self.o_proj = Linear(heads * dim, config.hidden_size, bias=output_bias)
        self.layer = layer
        self.window = config.layer_windows[layer]
        self.scale = dim**-0.5
        self.eps = config.rms_norm_eps
        self._head_dim = dim
        self._head_split = [heads, kv_heads, kv_heads]

    def __call__(self, hidden: Tensor, context: LayerContext, wanted: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size] -> [T, hidden_size], or only the `wanted` tokens [R] of it.

        The KV of all T tokens is in `context.kv` afterwards.
        """
        batch, kv = context.batch, context.kv
        qkv = self.qkv_proj(hidden).unflatten(-1, (-1, self._head_dim))
        q, k, v = qkv.split(self._head_split, dim=1)
        q_norm = None if self.q_norm is None else self.q_norm.weight.data
        k_norm = None if self.k_norm is None else self.k_norm.weight.data
        q = rope_and_cache(q, k, v, context.cos_sin, kv, self.layer, batch, q_norm=q_norm, k_norm=k_norm, eps=self.eps)
        out = paged_attention(q, kv, self.layer, batch, scale=self.scale, window=self.window).flatten(1)
        return self.o_proj(out if wanted is None else out[wanted])
