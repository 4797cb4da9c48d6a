"""Linear layers over the packed weights of `baton.kernels.linear`, or over weights in 8 bits (`layers.fp8`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from baton.kernels import fp8
from baton.kernels.linear import PackedWeight, RowNorm, gated_linear, linear, pack

from .base import Layer, Parameter, Slot, join

if TYPE_CHECKING:
    from .fp8 import Fp8Format


class Linear(Layer):
    """y [T, N] = x [T, K] @ weight [N, K].T + bias [N]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.weight = Parameter(out_features, in_features)
        self.bias = Parameter(out_features) if bias else None
        self._scale: tuple[str, Parameter] | None = None  # of a weight in 8 bits, with its name in the checkpoint
        self._packed: PackedWeight | fp8.Fp8Weight | None = None

    def parts_at(self, path: str) -> dict[str, int]:
        """The layers of the checkpoint that this one at `path` is made of, and their output sizes."""
        return {path: self.out_features}

    def take_format(self, form: Fp8Format) -> None:
        """From now on, and before `allocate`, the weight is one in 8 bits."""
        self.weight, scale = form.parameters(self.out_features, self.in_features)
        self._scale = (form.scale_name, scale)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from super().parameters()
        if self._scale is not None:
            yield self._scale

    def slots(self, path: str = "") -> Iterator[Slot]:
        for name, parameter in self.parameters():
            start = 0
            for part, rows in self.parts_at(path).items():
                yield parameter.slot(join(part, name), start, rows)
                start += rows

    def finish(self) -> None:
        weight = self.weight.data
        self._packed = pack(weight) if self._scale is None else fp8.Fp8Weight(weight, self._scale[1].data)
        self.weight.release()

    def __call__(
        self, x: Tensor, *, norm: RowNorm | None = None, add_to: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """With what stands right before and behind the product: see `baton.kernels.linear.linear`."""
        assert self._packed is not None, "finish() comes before the first call"
        bias = None if self.bias is None else self.bias.data
        if isinstance(self._packed, fp8.Fp8Weight):
            return fp8.linear(x, self._packed, bias, norm=norm, add_to=add_to, out=out)
        return linear(x, self._packed, bias, norm=norm, add_to=add_to, out=out)

    def gated(self, x: Tensor, *, norm: RowNorm | None = None) -> Tensor:
        """silu(first half) * second half of the result, [T, N / 2]: see `baton.kernels.linear.gated_linear`."""
        assert self._packed is not None, "finish() comes before the first call"
        bias = None if self.bias is None else self.bias.data
        if isinstance(self._packed, fp8.Fp8Weight):
            return fp8.gated_linear(x, self._packed, bias, norm=norm)
        return gated_linear(x, self._packed, bias, norm=norm)


class MergedLinear(Linear):
    """Several linear layers of the same input as one matrix, their outputs side by side.

    `parts` maps each one's name in the checkpoint, a sibling of this layer, to its output size.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)

    def parts_at(self, path: str) -> dict[str, int]:
        parent = path.rpartition(".")[0]
        return {join(parent, name): rows for name, rows in self.parts.items()}
