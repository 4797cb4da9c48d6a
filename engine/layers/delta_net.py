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
                    query and key, then the values and the gates of all heads that share them
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
            whole = self.in_proj.parts["in_proj_qkvz"].size // shape.num_key_heads
            gates = 2 * shape.num_value_heads // shape.num_key_heads
            parts = {"in_proj_qkvz": key_heads.times(whole), "in_proj_ba": key_heads.times(gates)}
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
        qkv, z, b, a = self._split(self.in_proj(hidden, norm=norm))
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

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v [T, conv_channels] side by side, z [T, value_width], b and a [T, heads]."""
        shape, heads = self.shape, self.shape.num_value_heads
        if not self._by_key_head:
            return projected.split([shape.conv_channels, shape.value_width, heads, heads], dim=1)
        qkvz, ba = projected.split([shape.conv_channels + shape.value_width, 2 * heads], dim=1)
        values = shape.value_width // shape.num_key_heads
        split = [shape.key_dim, shape.key_dim, values, values]
        q, k, v, z = (part.flatten(1) for part in qkvz.unflatten(1, (shape.num_key_heads, -1)).split(split, dim=2))
        b, a = (part.flatten(1) for part in ba.unflatten(1, (shape.num_key_heads, -1)).chunk(2, dim=2))
        return torch.cat([q, k, v], 1), z, b, a
