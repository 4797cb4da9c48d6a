"""Weight methods: how a weight is stored in a checkpoint, held in memory and multiplied.

    checkpoint ──slots──> parameters ──pack──> packed weight ──multiply(x, bias, activation, ...)──> y

`Linear` and `Experts` know shapes, ranks and biases, and leave everything else to their method. They begin with the
plain one; `weights.loader` gives the layers that a checkpoint has quantized another (`use`), before memory is
allocated. A method never sees the device: a device without kernels for it gets plain weights.

    method           stored                                       in memory       multiplied by
    plain            any floating-point type                       model's dtype   kernels.linear, kernels.moe
    FP8              E4M3, a scale a block, row or tensor          the same        kernels.fp8, kernels.moe
    MXFP4 (experts)  E2M1 in bytes, a power of two a group of 32   model's dtype   kernels.moe
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
    """A weight [N, K] as its kernels read it."""

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
        """Compute y = norm(x) @ weight.T + bias: x [T, K] -> [T, N]. With the activation of a gate, and gates in the
        first half of y, `activation(gates) * ups` [T, N / 2] of it; with another, that of each value.

        Without an activation, the result is written to `out` or added to `add_to` in place where one is given.
        """


class LinearMethod(abc.ABC):
    """The way in which the weight [N, K] of a linear layer is stored, held and multiplied."""

    def fits(self, columns: Share, parts: Sequence[Share]) -> bool:
        """Return whether a rank's shares of these columns, and of the rows of these layers, can be one matrix.

        Layers stay plain whose merging or division would cut what belongs together, such as values under one scale.
        """
        return True

    @abc.abstractmethod
    def declare(self, rows: Share, columns: Share) -> dict[str, Parameter]:
        """Return the parameters for a rank's share, by their names in the checkpoint behind the layer's.

        `Parameter.slot` is asked for the slot of each checkpoint tensor, with the first row and the rows of the weight.
        """

    @abc.abstractmethod
    def multiply_rows(self, tensors: Mapping[str, Tensor], factors: Sequence[tuple[int, float]]) -> None:
        """Multiply so many rows of the weight after another by a factor each, in what was loaded."""

    @abc.abstractmethod
    def pack(self, tensors: Mapping[str, Tensor]) -> LinearWeight:
        """Lay out for the kernels what was loaded into the declared parameters, by the same names."""


def multiply_stretches(rows: Tensor, factors: Sequence[tuple[int, float]]) -> None:
    """Multiply so many rows after another by a factor each, in place."""
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

    def pack(self, tensors: Mapping[str, Tensor]) -> LinearWeight:
        return PlainWeight(pack(tensors["weight"]))


PLAIN = PlainMethod()


@dataclass(frozen=True)
class PlainWeight(LinearWeight):
    """A matrix, in panels on a CPU."""

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
    """The part of a layer's experts that a rank holds: some of the experts, and of each a stretch of its width."""

    held: Held
    width: Share
    hidden_size: int
    projections: tuple[str, ...]  # names of an expert's gate, up and down projection, stored by itself; or up and down

    @property
    def parts(self) -> int:
        """The rows of `gate_up` for each value of the width: a gate and an up, or an up."""
        return len(self.projections) - 1


class PackedExperts(abc.ABC):
    """The experts of a layer as their kernels read them."""

    @abc.abstractmethod
    def multiply(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor, add_to: Tensor | None) -> Tensor:
        """Sum the outputs of each token's experts by their weights, on top of `add_to` in place where there is one.

        hidden [T, hidden_size], expert_ids and weights [T, top_k] -> [T, hidden_size].
        """


class ExpertsMethod(abc.ABC):
    """The way in which the matrices of a layer's experts are stored, held and multiplied."""

    @abc.abstractmethod
    def declare(self, shape: ExpertsShape) -> dict[str, Parameter]:
        """Return the parameters for a rank's part by name. Each begins with the dimension of the experts held."""

    @abc.abstractmethod
    def slots(self, shape: ExpertsShape, parameters: Mapping[str, Parameter], path: str) -> Iterator[Slot]:
        """Yield the checkpoint tensors below `path` that fill the declared parameters."""

    @abc.abstractmethod
    def pack(
        self,
        tensors: Mapping[str, Tensor],
        *,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: GatedActivation | Pointwise,
    ) -> PackedExperts:
        """Lay out for the kernels what was loaded into the declared parameters, by the same names."""
