"""Gated DeltaNet: linear attention whose state forgets and corrects itself (arXiv:2412.06464; `kernels.gated_delta`).

    q, k, v = conv(x W_qkv)       out = norm(delta rule(q, k, v, gates of x W_a, x W_b)) * silu(x W_z)

The cache of a sequence is one slot: the last inputs of the convolution, and a state matrix for each head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.parallel.groups import ParallelGroups
from baton.kernels.gated_delta import Gate
from baton.kernels.linear import RowNorm
from baton.kernels.rms_norm import gated_rms_norm

from .base import Layer, Parameter, Share
from .linear import Linear
from .norm import RMSNorm
from .recurrent import DeltaMixer, DepthwiseConv, LayerStates, MergedConv
from .step_context import LayerContext, rows_at


class GatedDeltaNet(DeltaMixer):
    """One layer of Gated DeltaNet. Checkpoints have `A_log`, `dt_bias` and, depending on their form:

        "merged"        `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`, `conv1d`, `norm`, `out_proj`
        "by key head"   `in_proj_qkvz` and `in_proj_ba`, whose outputs are stored key head by key head: its query and
                        key, then the values and gates of all value heads that share it; the rest as in "merged"
        "apart"         `q_proj`, `k_proj`, `v_proj`, `g_proj`, `b_proj`, `a_proj`, `q_conv1d`, `k_conv1d`, `v_conv1d`,
                        `o_norm`, `o_proj`

    In memory, the projections are always in the order of "merged"; b and a are the `gates` of `DeltaMixer`. `norm_eps`
    is the epsilon of the norm after the delta rule; None: the model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        stored: Literal["merged", "by key head", "apart"] = "merged",
        norm_eps: float | None = None,
    ) -> None:
        shape = config.linear
        assert shape is not None, "a config of this family has linear attention"
        self.shape = shape
        self._stored = stored
        heads, key_heads = Share.all(shape.num_value_heads), Share.all(shape.num_key_heads)
        wide, gates = self._projections(key_heads, heads)
        widths = ({name: share.whole for name, share in parts.items()} for parts in (wide, gates))
        self._make_projections(config, *widths)
        if stored == "by key head":
            self._keep_projections(wide, gates)
        self.conv1d: DepthwiseConv
        if stored == "apart":
            channels = self._convolutions(key_heads, heads)
            self.conv1d = MergedConv({name: share.whole for name, share in channels.items()}, shape.conv_width)
        else:
            self.conv1d = DepthwiseConv(shape.conv_channels, shape.conv_width)
        self.A_log = Parameter(heads.size, dtype=torch.float32)
        self.dt_bias = Parameter(heads.size, dtype=torch.float32)
        self.norm = RMSNorm(shape.value_dim, config.rms_norm_eps if norm_eps is None else norm_eps)
        self.out_proj = Linear(shape.value_width, config.hidden_size)
        self.place = config.caches.state_place_of(layer)
        self._states = LayerStates(config, self.place)

    def children(self) -> Iterator[tuple[str, Layer]]:
        names = {"norm": "o_norm", "out_proj": "o_proj"} if self._stored == "apart" else {}
        for name, child in super().children():
            yield names.get(name, name), child

    def divide(self, groups: ParallelGroups) -> None:
        """Divide the key heads over the ranks, in order, and with each key head the value heads that share it."""
        shape, tp = self.shape, groups.tp
        key_heads, heads = Share.part(shape.num_key_heads, tp), Share.part(shape.num_value_heads, tp)
        self._keep_projections(*self._projections(key_heads, heads))
        channels = self._convolutions(key_heads, heads)
        if isinstance(self.conv1d, MergedConv):
            self.conv1d.keep_parts(channels)
        else:
            self.conv1d.keep(Share.of_sections(list(channels.values())))
        for parameter in (self.A_log, self.dt_bias):
            parameter.keep(0, heads)
        self.out_proj.keep_columns(heads.times(shape.value_dim), tp)
        self.shape = replace(shape, num_key_heads=key_heads.size, num_value_heads=heads.size)
        self._states.divide(tp.rank, tp.size)

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
        wide, gates = (shape.conv_channels, shape.value_width), (shape.num_value_heads,) * 2
        qkv, z, b, a = self._project(hidden, norm, wide, gates)
        gate = Gate(a, b, self.A_log.data, self.dt_bias.data, shape.beta_scale)
        out = self._mix(qkv, self.conv1d, gate, cache)
        gated = gated_rms_norm(
            out, self.norm.weight.data, z.unflatten(1, (-1, shape.value_dim)), self.norm.eps
        ).flatten(1)
        return self.out_proj(gated if wanted is None else rows_at(gated, wanted), add_to=add_to)

    def _projections(self, key_heads: Share, heads: Share) -> tuple[dict[str, Share], dict[str, Share]]:
        """Return these heads' share of the outputs of each projection: of the wide ones, and of b and a."""
        shape = self.shape
        keys, values = key_heads.times(shape.key_dim), heads.times(shape.value_dim)
        if self._stored == "apart":
            qkv = {"q_proj": keys, "k_proj": keys, "v_proj": values}
            return {**qkv, "g_proj": values}, {"b_proj": heads, "a_proj": heads}
        if self._stored == "merged":
            qkv = {"in_proj_qkv": Share.of_sections([keys, keys, values])}
            return {**qkv, "in_proj_z": values}, {"in_proj_b": heads, "in_proj_a": heads}
        group = shape.num_value_heads // shape.num_key_heads
        of_group = group * shape.value_dim
        parts = [shape.key_dim, shape.key_dim, of_group, of_group]  # each one's of all heads side by side
        return {"in_proj_qkvz": Share.of_parts(key_heads, parts)}, {
            "in_proj_ba": Share.of_parts(key_heads, [group, group])
        }

    def _convolutions(self, key_heads: Share, heads: Share) -> dict[str, Share]:
        """Return these heads' share of the channels of each convolution."""
        keys, values = key_heads.times(self.shape.key_dim), heads.times(self.shape.value_dim)
        return {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}
