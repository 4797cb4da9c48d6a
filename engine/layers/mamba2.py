"""Mamba-2: a mixer with a recurrent state that decays at a rate per head (arXiv:2405.21060; `kernels.ssd`).

    z, xBC, dt = x W_in          x, B, C = silu(conv(xBC))          out = norm(SSD(x, B, C, dt), silu(z)) W_out

The cache of a sequence is one slot: the last inputs of the convolution, and a state matrix for each head. Heads of a
group share B and C, as query heads share keys; the norm is computed over each group's width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.hf_config.mamba import MambaNorm
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.parallel.groups import ALONE, Group, ParallelGroups
from baton.kernels import elementwise
from baton.kernels.activation import Activation, activation_and_mul
from baton.kernels.causal_conv import causal_conv
from baton.kernels.linear import RowNorm
from baton.kernels.rms_norm import gated_rms_norm
from baton.kernels.ssd import SSDDrafts, TimeSteps, ssd

from .base import Parameter, Share
from .head_projection import shared_heads
from .linear import Linear
from .norm import RMSNorm
from .recurrent import DepthwiseConv, LayerStates
from .step_context import LayerContext, rows_at
from .token_mixer import TokenMixer


class Mamba2(TokenMixer):
    """One layer of Mamba-2. Checkpoints have `in_proj`, `conv1d`, `A_log`, `D`, `dt_bias`, `norm` and `out_proj`.

    The config's multipliers are multiplied into the weights of the projections once they are loaded.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        shape = config.mamba
        assert shape is not None, "a config of this family has Mamba-2"
        self.shape = shape  # this rank's, after `divide`
        self.in_proj = Linear(config.hidden_size, sum(shape.parts), bias=shape.projection_bias)
        self.conv1d = DepthwiseConv(shape.conv_channels, shape.conv_width, bias=shape.conv_bias)
        self.A_log, self.D, self.dt_bias = (Parameter(shape.num_heads, dtype=torch.float32) for _ in range(3))
        self._order = MambaNorm(shape.norm)
        self.norm = None if self._order is MambaNorm.NONE else RMSNorm(shape.width, config.rms_norm_eps)
        self.out_proj = Linear(shape.width, config.hidden_size, bias=shape.projection_bias)
        self.place = config.caches.state_place_of(layer)
        self._eps = config.rms_norm_eps
        self._states = LayerStates(config, self.place)
        self._groups = Share.all(shape.num_groups)
        self._group: Group = ALONE  # the ranks, if they are more than the groups of heads and so share them

    def divide(self, groups: ParallelGroups) -> None:
        """Divide the heads over the ranks, in order, with the groups they belong to. Ranks may share a group."""
        shape, tp = self.shape, groups.tp
        heads, self._groups = Share.part(shape.num_heads, tp), shared_heads(shape.num_groups, tp)
        values, keys = heads.times(shape.head_dim), self._groups.times(shape.state_dim)
        self.in_proj.keep_rows(Share.of_sections([values, values, keys, keys, heads]))
        self.conv1d.keep(Share.of_sections([values, keys, keys]))
        for parameter in (self.A_log, self.D, self.dt_bias):
            parameter.keep(0, heads)
        if self.norm is not None:
            self.norm.weight.keep(0, values)
        self.out_proj.keep_columns(values, tp)
        self._states.divide(tp.rank, tp.size)
        if shape.num_groups < tp.size:
            self._group = tp
        self.shape = replace(shape, num_heads=heads.size, num_groups=self._groups.size)

    def finish(self) -> None:
        shape = self.shape
        self.in_proj.multiply_rows(list(zip(shape.parts, shape.multipliers, strict=True)))
        self.out_proj.multiply_rows([(self.out_proj.out_features, shape.output_multiplier)])
        super().finish()

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
        projected = self.in_proj(hidden, norm=norm)
        z, xbc, dt = projected.split([shape.width, shape.conv_channels, shape.num_heads], dim=1)
        views = self._states.of(cache)
        xbc = causal_conv(
            *(xbc, self.conv1d.filters, views.conv_inputs, cache.batch),
            bias=self.conv1d.shift,
            drafts=views.conv_drafts,
        )
        x, b, c = xbc.split([shape.width, shape.group_width, shape.group_width], dim=1)
        out = ssd(
            x.unflatten(1, (-1, shape.head_dim)),
            b.unflatten(1, (-1, shape.state_dim)),
            c.unflatten(1, (-1, shape.state_dim)),
            TimeSteps(dt, self.A_log.data, self.dt_bias.data, shape.time_step_limits),
            views.state,
            cache.batch,
            skip=self.D.data,
            drafts=SSDDrafts(*views.drafts) if views.drafts else None,
        )
        gated = self._gated(out.flatten(1), z)
        return self.out_proj(gated if wanted is None else rows_at(gated, wanted), add_to=add_to)

    def _gated(self, out: Tensor, z: Tensor) -> Tensor:
        """Return `out` [T, width], gated by `z` and normed, in out's dtype."""
        if self.norm is None:
            return activation_and_mul(torch.cat([z, out], 1), Activation.SILU)
        if self._group.size > 1:
            return self._normed_over_ranks(out, z, self.norm.weight.data)
        groups = (self.shape.num_groups, -1)
        normed = gated_rms_norm(
            out.unflatten(1, groups),
            self.norm.weight.data.unflatten(0, groups),
            z.unflatten(1, groups),
            self._eps,
            gate_first=self._order is MambaNorm.GATE_FIRST,
        )
        return normed.flatten(1)

    def _normed_over_ranks(self, out: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        """Do the same if several ranks have parts of one group: they all-reduce its mean of squares."""
        gate, values = elementwise.silu(z.float()), out.float()
        if self._order is MambaNorm.GATE_FIRST:
            values = values * gate
        squares = values.new_zeros(len(values), self._groups.whole)
        squares[:, self._groups.start] = values.square().sum(1)
        sharing = self._group.size // self._groups.whole  # number of ranks that share a group
        means = self._group.all_reduce(squares)[:, self._groups.start, None] / (self.shape.width * sharing)
        normed = values * torch.rsqrt(means + self._eps) * weight.float()
        return (normed if self._order is MambaNorm.GATE_FIRST else normed * gate).to(out.dtype)
