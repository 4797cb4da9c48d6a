"""Feed-forward layers: gated ones, of Llama and its successors (SwiGLU and GEGLU, arXiv:2002.05202), and plain ones."""

from __future__ import annotations

import abc
from collections.abc import Iterator

import torch
from torch import Tensor

from baton.engine.parallel.groups import Group, ParallelGroups
from baton.kernels.linear import Activation, Pointwise, RowNorm

from .base import Layer, Share, TokenRows
from .linear import Linear, MergedLinear

CPU_SLICE = 512  # tokens whose intermediate activations stay in the last-level cache between the two products


class FeedForward(Layer, abc.ABC):
    """The part of a decoder layer behind attention."""

    @abc.abstractmethod
    def __call__(
        self, hidden: Tensor, rows: TokenRows, *, norm: RowNorm | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        """Compute [T, hidden_size] of hidden [T, hidden_size], which are the `rows`, through `norm` first.

        With `add_to` the result is added to what that holds, in place where the layer is not divided over ranks; what
        is returned is the sum. What padding gives is arbitrary.
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

    merged      the checkpoint has gates and ups in one tensor, `input_linear`, and calls the other `output_linear`

    Multipliers, of what the gate and what all of it gives, go into the weights when these have been loaded.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: Activation = Activation.SILU,
        merged: bool = False,
        gate_multiplier: float = 1.0,
        output_multiplier: float = 1.0,
    ) -> None:
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        if merged:
            parts = {"input_linear": 2 * intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)
        self._activation = activation
        self._merged = merged
        self._multipliers = (gate_multiplier, output_multiplier)

    def children(self) -> Iterator[tuple[str, Layer]]:
        for name, child in super().children():
            yield "output_linear" if self._merged and child is self.down_proj else name, child

    def divide(self, groups: ParallelGroups) -> None:
        self.divide_over(groups.tp)

    def divide_over(self, group: Group, *, summed: bool = True) -> None:
        """`summed=False`: the caller sums what the ranks give."""
        share = Share.part(self.down_proj.in_features, group)
        parts = {"gate_proj": share, "up_proj": share}
        self.gate_up_proj.keep_parts({"input_linear": Share.of_sections([share, share])} if self._merged else parts)
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
