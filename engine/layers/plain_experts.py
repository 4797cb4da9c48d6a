"""Experts in the model's dtype, and the forms in which checkpoints store them (`ExpertsConfig.stored`).

Tensor names below the layer's name, for E experts of width F in a model of hidden size H:

    each         0.gate_proj.weight [F, H], 0.up_proj.weight [F, H], 0.down_proj.weight [H, F], 1.gate_proj.weight, ...
                 (without gates: 0.up_proj.weight, 0.down_proj.weight, 1.up_proj.weight, ...)
    stacked      gate_up_proj [E, 2 F, H], gates before ups; down_proj [E, H, F]
    linears      the same shapes as "stacked", named input_linear.weight and output_linear.weight
    transposed   gate_up_proj [E, H, 2 F], columns of gates and ups interleaved; down_proj [E, F, H]

In memory, rows of gates and ups are interleaved, as `kernels.moe.ExpertWeights` describes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.activation import Pointwise
from baton.kernels.moe import ExpertWeights, GatedActivation, fused_experts, pack

from .base import Held, Parameter, Share, Slot, StackSlot, join
from .method import ExpertsMethod, ExpertsShape, PackedExperts

# Names of the two stacks (gates and ups, downs), for each form that stacks all experts.
STACKS = {
    "stacked": ("gate_up_proj", "down_proj"),
    "linears": ("input_linear", "output_linear"),
    "transposed": ("gate_up_proj", "down_proj"),
    "mxfp4": (),
}


@dataclass(frozen=True)
class FusedExperts(PackedExperts):
    """Experts for `kernels.moe.fused_experts`."""

    experts: ExpertWeights

    def multiply(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor, add_to: Tensor | None) -> Tensor:
        return fused_experts(hidden, self.experts, expert_ids, weights, add_to=add_to)


class FusedMethod(ExpertsMethod):
    """A method whose parameters are fields of `ExpertWeights`: `gate_up` [E, 2 F, H] or [E, F, H], `down` [E, H, F]."""

    dtype: torch.dtype | None = None  # dtype of the matrices; None: the model's

    def declare(self, shape: ExpertsShape) -> dict[str, Parameter]:
        places, depth = shape.held.places, Share.all(shape.hidden_size)
        return {
            "gate_up": Parameter.part(places, shape.width.times(shape.parts), depth, dtype=self.dtype),
            "down": Parameter.part(places, depth, shape.width, dtype=self.dtype),
        }

    def pack(
        self,
        tensors: Mapping[str, Tensor],
        *,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: GatedActivation | Pointwise,
    ) -> PackedExperts:
        experts = ExpertWeights(
            tensors["gate_up"],
            tensors["down"],
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            activation=activation,
            gate_up_scale=tensors.get("gate_up_scale"),
            down_scale=tensors.get("down_scale"),
        )
        return FusedExperts(pack(experts))


class PlainExperts(FusedMethod):
    """Matrices in the model's dtype, stored in one of the forms above."""

    def __init__(self, stored: str) -> None:
        self._stored = stored

    def slots(self, shape: ExpertsShape, parameters: Mapping[str, Parameter], path: str) -> Iterator[Slot]:
        gate_up, down = parameters["gate_up"], parameters["down"]
        gate_up_name, down_name = join(path, "gate_up_proj"), join(path, "down_proj")
        match self._stored:
            case "each":
                yield from slots_of_each(shape, gate_up, down, path, "weight")
            case "stacked":
                yield HalvesSlot(gate_up_name, gate_up, shape.held)
                yield StackSlot(down_name, down, shape.held)
            case "linears":
                yield HalvesSlot(join(path, "input_linear.weight"), gate_up, shape.held)
                yield StackSlot(join(path, "output_linear.weight"), down, shape.held)
            case "transposed":
                yield TransposedSlot(gate_up_name, gate_up, shape.held)
                yield TransposedSlot(down_name, down, shape.held)
            case _:
                raise AssertionError(f"experts stored as {self._stored!r} have another method")


def slots_of_each(shape: ExpertsShape, gate_up: Parameter, down: Parameter, path: str, suffix: str) -> Iterator[Slot]:
    """Yield slots for every expert's matrices, or for their scales: tensors `{path}.{expert}.{projection}.{suffix}`."""
    places = {expert: place for place, expert in enumerate(shape.held.items)}
    *upper_names, down_name = shape.projections
    width, depth = down.shares[2], gate_up.shape[2]
    for expert in range(shape.held.whole):
        own, place = join(path, str(expert)), places.get(expert)
        for start, name in enumerate(upper_names):
            full_name = f"{own}.{name}.{suffix}"
            if place is None:
                yield Slot.elsewhere(full_name, (width.whole, depth), gate_up)
            else:
                yield Slot(full_name, gate_up, start, width, step=shape.parts, item=place)
        full_name = f"{own}.{down_name}.{suffix}"
        if place is None:
            yield Slot.elsewhere(full_name, (depth, width.whole), down)
        else:
            yield Slot(full_name, down, item=place)


class HalvesSlot(StackSlot):
    """Loads [E, 2 F, H] with gates before ups into a parameter in which their rows are interleaved."""

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
    """Loads matrices that the checkpoint stores transposed."""

    __slots__ = ()

    def __init__(self, name: str, parameter: Parameter, held: Held) -> None:
        super().__init__(name, parameter, held)
        items, rows, columns = self.shares
        self.shares = (items, columns, rows)

    def _place_item(self, target: Tensor, item: Tensor) -> None:
        target.copy_(item.T)
