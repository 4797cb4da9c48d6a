"""Kimi Delta Attention: the gated delta rule with a decay for each key dimension (arXiv:2510.26692).

    q, k, v = conv(x W_q, x W_k, x W_v)             decays = x F_a F_b, beta = x W_b (`kernels.gated_delta.Gate`)
    out = norm(delta rule(q, k, v, decays, beta)) * sigmoid(x G_a G_b)

The cache of a sequence is one slot: the last inputs of the convolutions of q, k and v, concatenated, and a state matrix
for each head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.parallel.groups import ParallelGroups
from baton.kernels.gated_delta import Gate
from baton.kernels.linear import RowNorm
from baton.kernels.rms_norm import Gating, gated_rms_norm

from .base import Parameter, Share
from .linear import Linear
from .norm import RMSNorm
from .recurrent import DeltaMixer, LayerStates, MergedConv
from .step_context import LayerContext, rows_at


class KimiDeltaAttention(DeltaMixer):
    """One layer of Kimi Delta Attention.

    Checkpoints have `q_proj`, `k_proj`, `v_proj`, `q_conv1d`, `k_conv1d`, `v_conv1d`, `f_a_proj`, `f_b_proj`, `b_proj`,
    `g_a_proj`, `g_b_proj`, `o_norm`, `o_proj`, `A_log` [1, 1, heads, 1] and `dt_bias` [heads * head_dim].
    `f_a_proj`, `g_a_proj` and `b_proj` are the `gates` of `DeltaMixer`.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        shape = config.linear
        assert shape is not None, "a config of this family has linear attention"
        assert shape.gate_rank is not None, "its gates are of a low rank"
        self.shape = shape
        heads, keys, values, rank = shape.num_value_heads, shape.key_width, shape.value_width, shape.gate_rank
        qkv = {"q_proj": keys, "k_proj": keys, "v_proj": values}
        gates = {"f_a_proj": rank, "g_a_proj": rank, "b_proj": heads}
        self._make_projections(config, qkv, gates)
        self.conv = MergedConv({"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}, shape.conv_width)
        self.f_b_proj = Linear(rank, keys)
        self.g_b_proj = Linear(rank, values)
        self.A_log = Parameter(1, 1, heads, 1, dtype=torch.float32)
        self.dt_bias = Parameter(keys, dtype=torch.float32)
        self.o_norm = RMSNorm(shape.value_dim, config.rms_norm_eps)
        self.o_proj = Linear(values, config.hidden_size)
        self.place = config.caches.state_place_of(layer)
        self._rank = rank
        self._states = LayerStates(config, self.place)

    def divide(self, groups: ParallelGroups) -> None:
        """Divide the heads over the ranks, in order. `f_a_proj` and `g_a_proj` are whole on every rank."""
        shape, tp = self.shape, groups.tp
        heads = Share.part(shape.num_value_heads, tp)
        keys, values = heads.times(shape.key_dim), heads.times(shape.value_dim)
        qkv = {"q_proj": keys, "k_proj": keys, "v_proj": values}
        self._keep_projections(qkv, {"b_proj": heads})
        self.conv.keep_parts({"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values})
        self.f_b_proj.keep_rows(keys)
        self.g_b_proj.keep_rows(values)
        self.A_log.keep(2, heads)
        self.dt_bias.keep(0, keys)
        self.o_proj.keep_columns(values, tp)
        self.shape = replace(shape, num_key_heads=heads.size, num_value_heads=heads.size)
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
        small = (self._rank, self._rank, shape.num_value_heads)
        qkv, decays, gates, beta = self._project(hidden, norm, (shape.conv_channels,), small)
        per_dim = (shape.num_key_heads, shape.key_dim)
        decay = self.f_b_proj(decays).unflatten(1, per_dim)
        gate = Gate(decay, beta, self.A_log.data.flatten(), self.dt_bias.data.view(per_dim))
        out = self._mix(qkv, self.conv, gate, cache)
        out_gate = self.g_b_proj(gates).unflatten(1, (-1, shape.value_dim))
        gated = gated_rms_norm(out, self.o_norm.weight.data, out_gate, self.o_norm.eps, gating=Gating.SIGMOID)
        gated = gated.flatten(1)
        return self.o_proj(gated if wanted is None else rows_at(gated, wanted), add_to=add_to)
