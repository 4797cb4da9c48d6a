"""Moves experts between ranks while the engine serves, so that the tokens of the last steps would have been balanced.

All ranks do this before the same step (`GroupStep.reviews_experts`), with the same numbers, so that each computes
the same moves. Weights are overwritten in place, so captured steps use the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from ..core.messages import ExpertReview
from ..core.step import PendingStep, Runner, StepPlan
from ..parallel.groups import ParallelGroups
from ..parallel.placement import ExpertPlacement

if TYPE_CHECKING:
    from ..layers.base import Layer
    from ..layers.moe import SpreadExperts

WORTH_MOVING = 0.95  # new imbalance over the old one, at most: a smaller gain is not worth the bytes


class ExpertBalancer:
    """Adds up the loads of experts, and moves experts if that is allowed."""

    @classmethod
    def of(cls, model: Layer, groups: ParallelGroups, *, moves: bool) -> ExpertBalancer | None:
        """Return the balancer of a model; None if no experts are spread over ranks. Experts move only with `moves`."""
        layers = spread_experts(model)
        return cls(layers, groups, moves=moves) if layers else None

    def __init__(self, layers: Sequence[SpreadExperts], groups: ParallelGroups, *, moves: bool) -> None:
        self.last = ExpertReview()
        self._layers = layers
        self._groups = groups
        self._moves = moves

    def forget(self) -> None:
        """Drop the counts so far, which do not come from requests."""
        for layer in self._layers:
            layer.table.loads.zero_()

    @torch.inference_mode()
    def review(self) -> None:
        """Review the counts since the last review. Every rank of the group calls it before the same step."""
        loads = self._take_loads()
        before = [layer.placement.imbalance(counts) for layer, counts in zip(self._layers, loads, strict=True)]
        num_moves = self.last.num_moves
        if self._moves:
            for layer, counts, imbalance in zip(self._layers, loads, before, strict=True):
                target = layer.placement.balanced(counts)
                if target.imbalance(counts) < imbalance * WORTH_MOVING:
                    num_moves += self._move(layer, target)
        self.last = ExpertReview(imbalance=sum(before) / len(before), num_moves=num_moves)

    def _take_loads(self) -> list[list[int]]:
        """Return the tokens of each expert of each layer, summed over all ranks, and reset the counts."""
        loads = torch.stack([layer.table.loads for layer in self._layers])
        self.forget()
        counts: list[list[int]] = self._groups.dp.all_reduce(loads).tolist()  # within a TP group, all counted the same
        return counts

    def _move(self, layer: SpreadExperts, target: ExpertPlacement) -> int:
        """Copy experts to their new places. Returns how many the whole group has copied."""
        ep, slots = self._groups.ep, target.slots
        moves = layer.placement.moves_to(target)
        going = [move for move in moves if move.source // slots == ep.rank]
        coming = sorted(
            (move for move in moves if move.target // slots == ep.rank), key=lambda move: move.source // slots
        )
        sent, received = [0] * ep.size, [0] * ep.size
        for move in going:
            sent[move.target // slots] += 1
        for move in coming:
            received[move.source // slots] += 1
        for _, parameter in layer.experts.parameters():
            weights = parameter.data
            if weights.itemsize == 1:  # not every library supports every 8-bit type
                weights = weights.view(torch.uint8)
            source = torch.tensor([move.source % slots for move in going], dtype=torch.int64, device=weights.device)
            into = torch.tensor([move.target % slots for move in coming], dtype=torch.int64, device=weights.device)
            weights[into] = ep.all_to_all(weights[source], sent, received)
        layer.place(target)
        return len(moves)


class ReviewingRunner:
    """A runner that reviews experts before a step if the plan asks for it. Implements `core.step.Runner`."""

    def __init__(
        self, runner: Runner, balancer: ExpertBalancer, in_order: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """`in_order()` is a context in which work goes to the device in the order of steps. `runner` is warmed up."""
        self._runner = runner
        self._balancer = balancer
        self._in_order = in_order
        with in_order():
            balancer.forget()

    def launch(self, plan: StepPlan) -> PendingStep:
        if plan.group is not None and plan.group.reviews_experts:
            with self._in_order():
                self._balancer.review()
        return self._runner.launch(plan)


def spread_experts(layer: Layer) -> list[SpreadExperts]:
    """Return the experts of all layers that are spread over ranks."""
    from ..layers.base import layers_of
    from ..layers.moe import MoE

    return [moe.spread for _, moe in layers_of(MoE, layer) if moe.spread is not None]
