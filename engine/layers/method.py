"""Weight methods: how a weight is stored in a checkpoint, held in memory and multiplied.

    checkpoint ──slots──> parameters ──pack──> packed weight ──multiply(x, bias, activation, ...)──> y

`Linear` and `Experts` know shapes, ranks and biases, and leave everything else to their method. At first this is the
plain method. Before memory is allocated, `weights.loader` gives another one (`use`) to layers that the checkpoint has
quantized. A method does not know the device: on a device without kernels for a format, layers keep the plain method.

    method           stored as                                       in memory       multiplied by
    plain            any floating-point type                         model's dtype   kernels.linear, kernels.moe
    FP8              E4M3, a scale per block, row or tensor          the same        kernels.fp8, kernels.moe
    MXFP4 (experts)  E2M1 in bytes, a power of two per group of 32   model's dtype   kernels.moe
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from baton.kernels.linear import Activation, PackedWeight, Pointwise, RowNorm, gated_linear, linear, pack
from baton.kernels.moe import GatedActivation

from .base import Held, Parameter, Share, Slot


class LinearWeight(abc.ABC):
    """A weight [N, K] in the layout of its kernels."""

    @abc.abstractmethod
    def multiply(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        activation: Activation | Pointwise | None = None,
        norm: RowNorm | None = None,
        add_to: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute y = norm(x) @ weight.T + bias: x [T, K] -> [T, N].

        An `Activation` takes the first half of y as gates and returns `activation(gates) * ups` [T, N / 2]; a
        `Pointwise` is applied to each value. Without an activation, the result is written to `out`, or added to
        `add_to` in place, if one is given.
        """


class LinearMethod(abc.ABC):
    """Defines how the weight [N, K] of a linear layer is stored, held in memory and multiplied."""

    def fits(self, columns: Share, parts: Sequence[Share]) -> bool:
        """Return whether this method can hold these columns, and these rows of merged layers (`parts`), in one matrix.

        It cannot if a border between layers or ranks would cut a block of values that share a scale. Such layers keep
        the plain method.
        """
        return True

    @abc.abstractmethod
    def declare(self, rows: Share, columns: Share) -> dict[str, Parameter]:
        """Return the parameters for a rank's share, by the last part of their names in the checkpoint (`weight`).

        `Linear.slots` calls `Parameter.slot` for each checkpoint tensor, with the first row here and the tensor's rows.
        """

    @abc.abstractmethod
    def multiply_rows(self, tensors: Mapping[str, Tensor], factors: Sequence[tuple[int, float]]) -> None:
        """Multiply successive runs of the loaded weight's rows, given as (number of rows, factor), by their factors."""

    @abc.abstractmethod
    def reorder_rows(self, tensors: Mapping[str, Tensor], order: Tensor) -> None:
        """Make row i of the loaded weight what row `order[i]` was. Rows only move within blocks of a common scale."""

    @abc.abstractmethod
    def pack(self, tensors: Mapping[str, Tensor]) -> LinearWeight:
        """Return the loaded tensors of the declared parameters, by the same names, in the kernels' layout."""


def multiply_stretches(rows: Tensor, factors: Sequence[tuple[int, float]]) -> None:
    """Multiply successive runs of rows, given as (number of rows, factor), by their factors in place."""
    first = 0
    for count, factor in factors:
        rows[first : first + count].mul_(factor)
        first += count


class PlainMethod(LinearMethod):
    """A matrix in the model's dtype."""

    def declare(self, rows: Share, columns: Share) -> dict[str, Parameter]:
        return {"weight": Parameter.part(rows, columns)}

    def multiply_rows(self, tensors: Mapping[str, Tensor], factors: Sequence[tuple[int, float]]) -> None:
        multiply_stretches(tensors["weight"], factors)

    def reorder_rows(self, tensors: Mapping[str, Tensor], order: Tensor) -> None:
        tensors["weight"].copy_(tensors["weight"][order])

    def pack(self, tensors: Mapping[str, Tensor]) -> LinearWeight:
        return PlainWeight(pack(tensors["weight"]))


PLAIN = PlainMethod()


@dataclass(frozen=True)
class PlainWeight(LinearWeight):
    """A matrix, in panels of rows on a CPU."""

    packed: PackedWeight

    def multiply(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        activation: Activation | Pointwise | None = None,
        norm: RowNorm | None = None,
        add_to: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if isinstance(activation, Activation):
            return gated_linear(x, self.packed, bias, activation=activation, norm=norm)
        return linear(x, self.packed, bias, activation=activation, norm=norm, add_to=add_to, out=out)


@dataclass(frozen=True)
class ExpertsShape:
    """The part of a layer's experts that a rank holds: some experts, and a range of the intermediate width of each."""

    held: Held
    width: Share
    hidden_size: int
    projections: tuple[str, ...]  # names of one expert's gate (if gated), up and down projections in checkpoints

    @property
    def parts(self) -> int:
        """The rows of `gate_up` for each value of the width: 2 (gate and up), or 1 without gates."""
        return len(self.projections) - 1


class PackedExperts(abc.ABC):
    """The experts of a layer in the layout of their kernels."""

    @abc.abstractmethod
    def multiply(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor, add_to: Tensor | None) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, added to `add_to` in place if given.

        hidden [T, hidden_size], expert_ids and weights [T, top_k] -> [T, hidden_size].
        """


class ExpertsMethod(abc.ABC):
    """Defines how the matrices of a layer's experts are stored, held in memory and multiplied."""

    @abc.abstractmethod
    def declare(self, shape: ExpertsShape) -> dict[str, Parameter]:
        """Return the parameters for a rank's part, by name. The first dimension of each is the held experts."""

    @abc.abstractmethod
    def slots(self, shape: ExpertsShape, parameters: Mapping[str, Parameter], path: str) -> Iterator[Slot]:
        """Yield the slots of checkpoint tensors below `path` that fill the declared parameters."""

    @abc.abstractmethod
    def pack(
        self,
        tensors: Mapping[str, Tensor],
        *,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: GatedActivation | Pointwise,
    ) -> PackedExperts:
        """Return the loaded tensors of the declared parameters, by the same names, in the kernels' layout."""
