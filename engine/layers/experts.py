"""The experts of a mixture, and the router that chooses among them.

How a checkpoint stores experts (`ExpertsConfig.stored`), below the name of this layer:

    each         0.gate_proj.weight [F, H], 0.up_proj.weight [F, H], 0.down_proj.weight [H, F], 1.gate_proj.weight, ...
    stacked      gate_up_proj [E, 2 F, H], gates before ups; down_proj [E, H, F]
    transposed   gate_up_proj [E, H, 2 F], gates and ups next to each other; down_proj [E, F, H]
    mxfp4        gate_up_proj_blocks, gate_up_proj_scales, down_proj_blocks, down_proj_scales: see `layers.mxfp4`

Experts one by one that come in 8 bits with a scale for each 128 x 128 values can stay so (`take_format`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from baton.engine.hf_config.experts import ExpertsConfig
from baton.kernels.fp8 import BLOCK
from baton.kernels.moe import ExpertWeights, GatedActivation, RoutingRule, fused_experts, route, router_logits

from .base import Layer, Parameter, Share, Slot, join
from .fp8 import Fp8Format
from .mxfp4 import packed_slots
from .stack import Held, StackSlot


class Router(Layer):
    """Chooses the experts of each token and the weight of each expert's output."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        self.weight = Parameter(config.num_experts, hidden_size)
        self.bias = Parameter(config.num_experts) if config.router_bias else None
        # Added to the scores where experts are chosen; it evens out their loads (DeepSeek-V3, arXiv:2412.19437).
        self.e_score_correction_bias = (
            Parameter(config.num_experts, dtype=torch.float32) if config.score_correction else None
        )
        self.rule = RoutingRule(
            config.top_k,
            config.scoring,
            config.renormalize,
            config.scale,
            config.num_groups,
            config.top_groups,
            config.group_score,
        )

    def __call__(self, hidden: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert ids [T, top_k] int32 and their weights [T, top_k] float32 for hidden [T, hidden_size].

        Tokens whose slot (`slots` int64 [T]) is -1 are padding: their expert is -1.
        """
        logits = router_logits(hidden, self.weight.data, _data(self.bias))
        return route(logits, self.rule, bias=_data(self.e_score_correction_bias), slots=slots)


class Experts(Layer):
    """Gated MLPs of one shape, stacked; gates and ups row by row next to each other, as `fused_experts` reads them."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        num_experts, width = config.num_experts, config.intermediate_size
        self.gate_up = Parameter(num_experts, 2 * width, hidden_size)
        self.down = Parameter(num_experts, hidden_size, width)
        self.gate_up_bias = Parameter(num_experts, 2 * width) if config.expert_biases else None
        self.down_bias = Parameter(num_experts, hidden_size) if config.expert_biases else None
        self.activation = GatedActivation(config.gate_slope, config.gate_limit, config.up_shift)
        self.gate_up_scale: Parameter | None = None  # of weights in 8 bits, as `ExpertWeights` has them
        self.down_scale: Parameter | None = None
        self.width = Share.all(width)  # of every expert, what is computed here
        self.held = Held(range(num_experts), num_experts)
        self.stored = config.stored
        self._names = config.projections
        self._scale_name = ""  # in the checkpoint, of a weight's scales
        self._weights: ExpertWeights | None = None

    def keep_width(self, share: Share) -> None:
        """Compute only this stretch of every expert's width; the caller sums the outputs over the ranks."""
        self.gate_up.keep(1, share.times(2))
        self.down.keep(2, share)
        if self.gate_up_bias is not None:
            self.gate_up_bias.keep(1, share.times(2))
        self.width = share

    def keep_experts(self, held: Sequence[int]) -> None:
        """Only these experts are here, each once, in this order; what `expert_ids` name are their places in it."""
        self.held = Held(held, self.held.whole)
        for _, parameter in self.parameters():
            parameter.keep(0, Share(0, len(held), self.held.whole))

    def parts_at(self, path: str) -> list[str]:
        """The linear layers of the checkpoint that this one at `path` is made of, where they are stored one by one."""
        if self.stored != "each":
            return []
        return [join(path, f"{expert}.{name}") for expert in range(self.held.whole) for name in self._names]

    def can_take(self, form: Fp8Format) -> bool:
        """Return whether there are kernels for it, and no block belongs to two ranks."""
        borders = (self.width.start, self.width.end, self.width.whole, self.down.shape[1])
        return self.stored == "each" and form.in_blocks and all(border % BLOCK == 0 for border in borders)

    def take_format(self, form: Fp8Format) -> None:
        """Keep the weights in 8 bits, from before `allocate` on."""
        self.gate_up.dtype = self.down.dtype = torch.float8_e4m3fn
        num_experts, deep, wide = self.held.whole, self.down.shape[1] // BLOCK, self.width.whole // BLOCK
        self.gate_up_scale = Parameter(num_experts, 2 * wide, deep, typical=1.0, dtype=torch.float32)
        self.down_scale = Parameter(num_experts, deep, wide, typical=1.0, dtype=torch.float32)
        blocks = Share(self.width.start // BLOCK, self.width.size // BLOCK, wide)
        self.gate_up_scale.keep(1, blocks.times(2))
        self.down_scale.keep(2, blocks)
        for scale in (self.gate_up_scale, self.down_scale):
            scale.keep(0, self.down.shares[0])
        self._scale_name = form.scale_name

    def __call__(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor, add_to: Tensor | None) -> Tensor:
        """Return the output of each token's experts, added to `add_to` in place where there is one.

        hidden [T, hidden_size], expert_ids and weights [T, top_k] -> [T, hidden_size].
        """
        assert self._weights is not None, "finish() comes before the first call"
        return fused_experts(hidden, self._weights, expert_ids, weights, add_to=add_to)

    def finish(self) -> None:
        last_bias = self.down_bias if self.width.start == 0 else None  # added once, whoever has the rest of the width
        self._weights = ExpertWeights(
            self.gate_up.data,
            self.down.data,
            _data(self.gate_up_bias),
            _data(last_bias),
            self.activation,
            _data(self.gate_up_scale),
            _data(self.down_scale),
        )

    def slots(self, path: str = "") -> Iterator[Slot]:
        gate_up, down = join(path, "gate_up_proj"), join(path, "down_proj")
        match self.stored:
            case "each":
                yield from self._slots_of_each(path)
            case "stacked":
                yield HalvesSlot(gate_up, self.gate_up, self.held)
                yield StackSlot(down, self.down, self.held)
            case "transposed":
                yield TransposedSlot(gate_up, self.gate_up, self.held)
                yield TransposedSlot(down, self.down, self.held)
            case "mxfp4":
                yield from packed_slots(gate_up, self.gate_up, self.held)
                yield from packed_slots(down, self.down, self.held)
        for name, bias in ((gate_up, self.gate_up_bias), (down, self.down_bias)):
            if bias is not None:
                yield StackSlot(f"{name}_bias", bias, self.held)

    def _slots_of_each(self, path: str) -> Iterator[Slot]:
        yield from self._slots_of_matrices(path, "weight", self.gate_up, self.down, self.width)
        if self.gate_up_scale is not None and self.down_scale is not None:
            blocks = self.down_scale.shares[2]
            yield from self._slots_of_matrices(path, self._scale_name, self.gate_up_scale, self.down_scale, blocks)

    def _slots_of_matrices(
        self, path: str, suffix: str, gate_up: Parameter, down: Parameter, width: Share
    ) -> Iterator[Slot]:
        """Return the slots of every expert's matrices, or of their scales. `width`: the share of a gate's rows."""
        places = {expert: place for place, expert in enumerate(self.held.items)}
        gate_name, up_name, down_name = self._names
        depth = gate_up.shape[2]
        for expert in range(self.held.whole):
            own, place = join(path, str(expert)), places.get(expert)
            for start, name in enumerate((gate_name, up_name)):
                full_name = f"{own}.{name}.{suffix}"
                if place is None:
                    yield Slot.elsewhere(full_name, (width.whole, depth), gate_up)
                else:
                    yield Slot(full_name, gate_up, start, width, step=2, item=place)
            full_name = f"{own}.{down_name}.{suffix}"
            if place is None:
                yield Slot.elsewhere(full_name, (depth, width.whole), down)
            else:
                yield Slot(full_name, down, item=place)


class HalvesSlot(StackSlot):
    """Experts' gates before their ups, [E, 2 F, H], to where gates and ups are next to each other."""

    __slots__ = ()

    def __init__(self, name: str, parameter: Parameter, held: Held) -> None:
        super().__init__(name, parameter, held)
        items, rows, columns = self.shares
        self.shares = (items, Share.all(rows.whole), columns)

    def _place_item(self, target: Tensor, item: Tensor) -> None:
        rows = self.parameter.shares[1]
        for first, half in enumerate(item.chunk(2)):
            target[first::2].copy_(half[rows.start // 2 : rows.end // 2])


class TransposedSlot(StackSlot):
    """Matrices whose rows are the parameter's columns."""

    __slots__ = ()

    def __init__(self, name: str, parameter: Parameter, held: Held) -> None:
        super().__init__(name, parameter, held)
        items, rows, columns = self.shares
        self.shares = (items, columns, rows)

    def _place_item(self, target: Tensor, item: Tensor) -> None:
        target.copy_(item.T)


def _data(parameter: Parameter | None) -> Tensor | None:
    return None if parameter is None else parameter.data
