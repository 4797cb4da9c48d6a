"""Feed-forward layers: gated (SwiGLU and GEGLU, arXiv:2002.05202), as in Llama and its successors, and plain."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from baton.engine.parallel.groups import Group, ParallelGroups
from baton.kernels.linear import Activation, Pointwise, RowNorm

from .base import Layer, Share
from .linear import Linear, MergedLinear
from .step_context import TokenRows

CPU_SLICE = 512  # tokens per pass: their intermediate activations stay in the last-level cache between both products


class FeedForward(Layer, abc.ABC):
    """The feed-forward part of a decoder layer: an MLP or a mixture of experts."""

    @abc.abstractmethod
    def __call__(
        self, hidden: Tensor, rows: TokenRows, *, norm: RowNorm | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        """Return the output [T, hidden_size] for hidden [T, hidden_size], which goes through `norm` first, if given.

        `rows` describes the T tokens. With `add_to`, the sum of `add_to` and the output is returned; the addition is in
        place unless the layer is divided over ranks. Outputs of padding are arbitrary.
        """
        ...


class MLP(FeedForward):
    """down(activation(up(x)))."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool = False, activation: Pointwise = Pointwise.RELU2
    ) -> None:
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)
        self._activation = activation

    def divide(self, groups: ParallelGroups) -> None:
        self.divide_over(groups.tp)

    def divide_over(self, group: Group, *, summed: bool = True) -> None:
        """See `GatedMLP.divide_over`."""
        share = Share.part(self.down_proj.in_features, group)
        self.up_proj.keep_rows(share)
        self.down_proj.keep_columns(share, group, summed=summed)

    def __call__(
        self,
        hidden: Tensor,
        rows: TokenRows | None = None,
        *,
        norm: RowNorm | None = None,
        add_to: Tensor | None = None,
    ) -> Tensor:
        return self.down_proj(self.up_proj(hidden, activation=self._activation, norm=norm), add_to=add_to)


class GatedMLP(FeedForward):
    """down(activation(gate(x)) * up(x)).

    merged      the checkpoint has gates and ups in one tensor of this name. If it is `input_linear`, the down one is
                called `output_linear`

    `gate_multiplier` and `output_multiplier`, factors of the gate's and of the MLP's output, are multiplied into the
    weights once they are loaded.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: Activation = Activation.SILU,
        merged: Literal["input_linear", "gate_up_proj"] | None = None,
        gate_multiplier: float = 1.0,
        output_multiplier: float = 1.0,
    ) -> None:
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        if merged is not None:
            parts = {merged: 2 * intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)
        self._activation = activation
        self._merged = merged
        self._multipliers = (gate_multiplier, output_multiplier)

    def children(self) -> Iterator[tuple[str, Layer]]:
        for name, child in super().children():
            yield "output_linear" if self._merged == "input_linear" and child is self.down_proj else name, child

    def divide(self, groups: ParallelGroups) -> None:
        self.divide_over(groups.tp)

    def divide_over(self, group: Group, *, summed: bool = True) -> None:
        """Divide the intermediate width over the group. With `summed=False`, the caller sums the ranks' outputs."""
        share = Share.part(self.down_proj.in_features, group)
        parts = {"gate_proj": share, "up_proj": share}
        if self._merged is not None:
            parts = {self._merged: Share.of_sections([share, share])}
        self.gate_up_proj.keep_parts(parts)
        self.down_proj.keep_columns(share, group, summed=summed)

    def finish(self) -> None:
        of_gate, of_output = self._multipliers
        self.gate_up_proj.multiply_rows([(self.down_proj.in_features, of_gate)])
        self.down_proj.multiply_rows([(self.down_proj.out_features, of_output)])
        super().finish()

    def __call__(
        self,
        hidden: Tensor,
        rows: TokenRows | None = None,
        *,
        norm: RowNorm | None = None,
        add_to: Tensor | None = None,
    ) -> Tensor:
        if hidden.is_cpu and add_to is None and len(hidden) > CPU_SLICE:
            return torch.cat([self._all_at_once(part, norm, None) for part in hidden.split(CPU_SLICE)])
        return self._all_at_once(hidden, norm, add_to)

    def _all_at_once(self, hidden: Tensor, norm: RowNorm | None, add_to: Tensor | None) -> Tensor:
        return self.down_proj(self.gate_up_proj(hidden, activation=self._activation, norm=norm), add_to=add_to)
