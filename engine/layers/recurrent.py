"""Parts of layers with recurrent states: projections, the convolution, and the states in cache slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.core.layout import DTYPE_BYTES, CachePlace, StateLayout
from baton.engine.hf_config.attention import LinearAttentionShape
from baton.engine.hf_config.model_config import ModelConfig
from baton.kernels.causal_conv import causal_conv
from baton.kernels.gated_delta import DeltaDrafts, Gate, gated_delta
from baton.kernels.linear import RowNorm

from .base import Layer, Parameter, Share, Slot, join
from .linear import MergedLinear
from .step_context import StateCache
from .token_mixer import TokenMixer


class DeltaMixer(TokenMixer):
    """A delta-rule mixer, which projects hidden states to wide outputs (q, k, v, ...) and to small ones for its gates.

    All projections are one matrix, `in_proj`. In a quantized checkpoint the gates' projections are a matrix of their
    own, `gate_proj`, because they are not quantized, or their rows end within a block of scales.
    """

    shape: LinearAttentionShape  # this rank's, after `divide`
    in_proj: MergedLinear
    gate_proj: MergedLinear | None
    _states: LayerStates

    def _make_projections(self, config: ModelConfig, wide: Mapping[str, int], gates: Mapping[str, int]) -> None:
        """Make the undivided matrices. `wide` and `gates` map names in the checkpoint to output sizes."""
        together = config.quantization is None
        self.in_proj = MergedLinear(config.hidden_size, {**wide, **gates} if together else wide)
        self.gate_proj = None if together else MergedLinear(config.hidden_size, gates)

    def _keep_projections(self, wide: Mapping[str, Share], gates: Mapping[str, Share]) -> None:
        """Compute only these outputs of the named projections here, and all outputs of the others."""
        if self.gate_proj is None:
            self.in_proj.keep_parts({**wide, **gates})
        else:
            self.in_proj.keep_parts(wide)
            self.gate_proj.keep_parts(gates)

    def _project(self, hidden: Tensor, norm: RowNorm | None, wide: Sequence[int], gates: Sequence[int]) -> list[Tensor]:
        """Return the projections of hidden [T, hidden_size], split into tensors [T, width], those of the gates last."""
        if self.gate_proj is None:
            return list(self.in_proj(hidden, norm=norm).split([*wide, *gates], dim=1))
        projections = ((self.in_proj, wide), (self.gate_proj, gates))
        return [part for layer, sizes in projections for part in layer(hidden, norm=norm).split(sizes, dim=1)]

    def _mix(self, qkv: Tensor, conv: DepthwiseConv, gate: Gate, cache: StateCache) -> Tensor:
        """Return the delta rule [T, value heads, value_dim] over q, k and v [T, channels], convolved first."""
        shape, views = self.shape, self._states.of(cache)
        qkv = causal_conv(qkv, conv.filters, views.conv_inputs, cache.batch, drafts=views.conv_drafts)
        q, k, v = qkv.split([shape.key_width, shape.key_width, shape.value_width], dim=1)
        return gated_delta(
            q.unflatten(1, (-1, shape.key_dim)),
            k.unflatten(1, (-1, shape.key_dim)),
            v.unflatten(1, (-1, shape.value_dim)),
            gate,
            views.state,
            cache.batch,
            scale=shape.key_dim**-0.5,
            drafts=DeltaDrafts(*views.drafts) if views.drafts else None,
        )


class DepthwiseConv(Layer):
    """A filter of `width` values for each channel, [channels, 1, width] as in checkpoints, and an optional bias."""

    def __init__(self, channels: int, width: int, *, bias: bool = False) -> None:
        self.weight = Parameter(channels, 1, width)
        self.bias = Parameter(channels) if bias else None

    def keep(self, channels: Share) -> None:
        """Hold only these channels. Must be called before `allocate`."""
        self.weight.keep(0, channels)
        if self.bias is not None:
            self.bias.keep(0, channels)

    @property
    def filters(self) -> Tensor:
        return self.weight.data.squeeze(1)

    @property
    def shift(self) -> Tensor | None:
        return None if self.bias is None else self.bias.data


class MergedConv(DepthwiseConv):
    """Several depthwise convolutions as one, their channels concatenated.

    `parts` maps the name of each in the checkpoint, a sibling of this layer, to its number of channels.
    """

    def __init__(self, parts: Mapping[str, int], width: int) -> None:
        super().__init__(sum(parts.values()), width)
        self.parts = {name: Share.all(channels) for name, channels in parts.items()}

    def keep_parts(self, shares: Mapping[str, Share]) -> None:
        """Hold only these channels of each part. Must be called before `allocate`."""
        self.parts = dict(shares)
        self.keep(Share.of_sections(list(shares.values())))

    def slots(self, path: str = "") -> Iterator[Slot]:
        parent, start = path.rpartition(".")[0], 0
        for name, channels in self.parts.items():
            yield self.weight.slot(join(parent, f"{name}.weight"), start, channels)
            start += channels.size


class StateViews(NamedTuple):
    """Views of one layer's states in all slots, and of its inputs that are kept for draft tokens."""

    conv_inputs: Tensor  # [slots, channels, width - 1]: the last inputs of the convolution
    state: Tensor  # [slots, heads, ...]: a matrix for each head
    conv_drafts: Tensor | None = None  # [places, channels]: inputs of the convolution; None: decodes have no drafts
    drafts: Sequence[Tensor] = ()  # [places, ...]: inputs of the recurrence, in the order of its kernels' aggregate


class LayerStates:
    """The layout of one layer's states in its cache group's slots, and of its inputs for draft tokens."""

    def __init__(self, config: ModelConfig, place: CachePlace) -> None:
        states = config.caches.groups[place.group].blocks
        assert isinstance(states, StateLayout), "its cache holds states"
        self._layer = place.index
        self._states = states
        self._draft_inputs = config.draft_inputs[place.group]

    def divide(self, rank: int, size: int) -> None:
        """Reduce the layout to rank `rank` of `size` tensor-parallel ranks."""
        self._states, self._draft_inputs = self._states.of_rank(rank, size), self._draft_inputs.of_rank(rank, size)

    def of(self, cache: StateCache) -> StateViews:
        """Return this layer's part of its cache group."""
        conv_inputs, state = self._parts(cache.slots, self._states)
        if cache.draft_inputs is None:
            return StateViews(conv_inputs, state)
        conv_drafts, *drafts = self._parts(cache.draft_inputs, self._draft_inputs)
        return StateViews(conv_inputs, state, conv_drafts, drafts)

    def _parts(self, slots: Tensor, layout: StateLayout) -> list[Tensor]:
        return [part_of(slots, layout, self._layer, part) for part in range(len(layout.parts))]


def part_of(slots: Tensor, layout: StateLayout, layer: int, part: int) -> Tensor:
    """Return a view of one part of a layer's states in all slots, [num_slots, *shape]."""
    shape, dtype = layout.parts[part].shape, layout.parts[part].dtype
    size = DTYPE_BYTES[dtype]
    first = (layer * layout.layer_bytes + layout.offsets[part]) // size
    values = slots.view(getattr(torch, dtype))
    return values[:, first : first + torch.Size(shape).numel()].unflatten(1, shape)
