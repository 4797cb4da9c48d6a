"""Linear layers over the packed weights of `baton.kernels.linear`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from baton.kernels.linear import PackedWeight, linear, pack

from .base import Layer, Parameter, Slot, join


class Linear(Layer):
    """y [T, N] = x [T, K] @ weight [N, K].T + bias [N]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        self.weight = Parameter(out_features, in_features)
        self.bias = Parameter(out_features) if bias else None
        self._packed: PackedWeight | None = None

    def finish(self) -> None:
        self._packed = pack(self.weight.data)
        self.weight.release()

    def __call__(self, x: Tensor) -> Tensor:
        assert self._packed is not None, "finish() comes before the first call"
        return linear(x, self._packed, None if self.bias is None else self.bias.data)


class MergedLinear(Linear):
    """Several linear layers of the same input as one matrix, their outputs side by side.

    `parts` maps each one's name in the checkpoint, a sibling of this layer, to its output size.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)

    def slots(self, path: str = "") -> Iterator[Slot]:
        parent = path.rpartition(".")[0]
        for name, parameter in self.parameters():
            start = 0
            for part, rows in self.parts.items():
                yield Slot(join(join(parent, part), name), parameter, start, rows)
                start += rows
