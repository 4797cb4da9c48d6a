"""Gated DeltaNet: linear attention whose state forgets and corrects itself (arXiv:2412.06464; `kernels.gated_delta`).

    q, k, v = conv(x W_qkv)       out = norm(delta rule(q, k, v, gates of x W_a, x W_b)) * silu(x W_z)

Its cache is a slot a sequence: the tail of the convolution's inputs, and a matrix a head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.parallel.groups import ParallelGroups
from baton.kernels.causal_conv import causal_conv
from baton.kernels.gated_delta import Gate, gated_delta
from baton.kernels.linear import RowNorm
from baton.kernels.rms_norm import gated_rms_norm

from .attention import LayerContext, TokenMixer
from .base import Parameter, Share, rows_at
from .linear import Linear, MergedLinear
from .norm import RMSNorm
from .recurrent import DepthwiseConv, parts_of, states_at


class GatedDeltaNet(TokenMixer):
    """One layer of it, in the checkpoint `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`, `conv1d`, `norm`,
    `out_proj`, `A_log` and `dt_bias`.

    by_key_head     the projections are `in_proj_qkvz` and `in_proj_ba`, whose outputs lie key head by key head: its
                    query and key, then the values and the gates of all heads that share them; here they lie as others
    """

    def __init__(self, config: ModelConfig, layer: int, *, by_key_head: bool = False) -> None:
        shape = config.linear
        assert shape is not None, "a config of this family has linear attention"
        self.shape = shape
        heads = shape.num_value_heads
        channels, values = shape.conv_channels, shape.value_width
        if by_key_head:
            parts = {"in_proj_qkvz": channels + values, "in_proj_ba": 2 * heads}
        else:
            parts = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        self.in_proj = MergedLinear(config.hidden_size, parts)
        self._by_key_head = by_key_head
        if by_key_head:
            self._keep_key_heads(Share.all(shape.num_key_heads))
        self.conv1d = DepthwiseConv(shape.conv_channels, shape.conv_width)
        self.A_log = Parameter(heads, dtype=torch.float32)
        self.dt_bias = Parameter(heads, dtype=torch.float32)
        self.norm = RMSNorm(shape.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(shape.value_width, config.hidden_size)
        self.place = config.caches.state_place_of(layer)
        self._eps = config.rms_norm_eps
        self._states = states_at(config, self.place)

    def divide(self, groups: ParallelGroups) -> None:
        """Give key heads to the ranks in order, and the value heads that share them."""
        shape, tp = self.shape, groups.tp
        key_heads, heads = Share.part(shape.num_key_heads, tp), Share.part(shape.num_value_heads, tp)
        keys, values = key_heads.times(shape.key_dim), heads.times(shape.value_dim)
        channels = Share.of_sections([keys, keys, values])
        if self._by_key_head:
            self._keep_key_heads(key_heads)
        else:
            parts = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
            self.in_proj.keep_parts(parts)
        self.conv1d.keep(channels)
        for parameter in (self.A_log, self.dt_bias):
            parameter.keep(0, heads)
        self.out_proj.keep_columns(values, tp)
        self.shape = replace(shape, num_key_heads=key_heads.size, num_value_heads=heads.size)
        self._states = self._states.of_rank(tp.rank, tp.size)

    def __call__(
        self,
        hidden: Tensor,
        context: LayerContext,
        wanted: Tensor | None = None,
        *,
        norm: RowNorm | None = None,
        add_to: Tensor | None = None,
    ) -> Tensor:
        shape, cache = self.shape, context.states_at(self.place)
        heads = shape.num_value_heads
        projected = self.in_proj(hidden, norm=norm)
        qkv, z, b, a = projected.split([shape.conv_channels, shape.value_width, heads, heads], dim=1)
        tail, state = parts_of(cache.slots, self._states, self.place.index)
        qkv = causal_conv(qkv, self.conv1d.filters, tail, cache.batch)
        q, k, v = qkv.split([shape.key_width, shape.key_width, shape.value_width], dim=1)
        out = gated_delta(
            q.unflatten(1, (-1, shape.key_dim)),
            k.unflatten(1, (-1, shape.key_dim)),
            v.unflatten(1, (-1, shape.value_dim)),
            Gate(a, b, self.A_log.data, self.dt_bias.data),
            state,
            cache.batch,
            scale=shape.key_dim**-0.5,
        )
        gated = gated_rms_norm(out, self.norm.weight.data, z.unflatten(1, (-1, shape.value_dim)), self._eps).flatten(1)
        return self.out_proj(gated if wanted is None else rows_at(gated, wanted), add_to=add_to)

    def _keep_key_heads(self, heads: Share) -> None:
        """Compute the projections of these key heads only, each projection's of all heads side by side."""
        shape = self.shape
        group = shape.num_value_heads // shape.num_key_heads
        values = group * shape.value_dim
        parts = {
            "in_proj_qkvz": Share.of_parts(heads, [shape.key_dim, shape.key_dim, values, values]),
            "in_proj_ba": Share.of_parts(heads, [group, group]),
        }
        self.in_proj.keep_parts(parts)
