"""Linear layers over the packed weights of `baton.kernels.linear`, or over weights in 8 bits (`layers.fp8`).

Divided over ranks, a layer computes some of its outputs from everything, or everything from some of its inputs:

    keep_rows       y_r = x @ W[rows_r].T          outputs are as divided as what reads them
    keep_columns    y = sum over r of x_r @ W[:, columns_r].T          one all-reduce
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from baton.engine.parallel.groups import ALONE, Group
from baton.kernels import fp8
from baton.kernels.linear import PackedWeight, RowNorm, gated_linear, linear, pack

from .base import Layer, Parameter, Share, Slot, join
from .fp8 import Fp8Format


class Linear(Layer):
    """y [T, N] = x [T, K] @ weight [N, K].T + bias [N]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        self.weight = Parameter(out_features, in_features)
        self.bias = Parameter(out_features) if bias else None
        self._scale: tuple[str, Parameter] | None = None  # of a weight in 8 bits, with its name in the checkpoint
        self._packed: PackedWeight | fp8.Fp8Weight | None = None
        self._sum: Group = ALONE  # whose products are summed
        self._adds = True  # whether the bias, and what the result is added to, are this rank's to add

    @property
    def out_features(self) -> int:
        """The number on this rank."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """The number on this rank."""
        return self.weight.shape[1]

    def parts_at(self, path: str) -> dict[str, Share]:
        """The layers of the checkpoint that this one at `path` is made of, and which of their outputs are here."""
        return {path: self.weight.shares[0]}

    def keep_rows(self, share: Share) -> None:
        """Only these outputs are computed here."""
        self.weight.keep(0, share)
        if self.bias is not None:
            self.bias.keep(0, share)

    def keep_columns(self, share: Share, group: Group, *, summed: bool = True) -> None:
        """Only these inputs are given here, the others to the other ranks of the group.

        Results are sums over the group, unless the caller wants to sum them: `summed=False`.
        """
        self.weight.keep(1, share)
        self._adds = group.rank == 0
        self._sum = group if summed else ALONE

    def take_format(self, form: Fp8Format) -> None:
        """Keep the weight in 8 bits, from before `allocate` on."""
        self.weight, scale = form.parameters(*self.weight.shares)
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
                start += rows.size

    def finish(self) -> None:
        weight = self.weight.data
        self._packed = pack(weight) if self._scale is None else fp8.Fp8Weight(weight, self._scale[1].data)
        self.weight.release()

    def __call__(
        self, x: Tensor, *, norm: RowNorm | None = None, add_to: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """With what stands right before and behind the product: see `baton.kernels.linear.linear`.

        A layer whose columns are divided adds the first rank's `add_to` only, which need not be what is returned.
        """
        assert self._packed is not None, "finish() comes before the first call"
        bias = None if self.bias is None or not self._adds else self.bias.data
        if not self._adds:
            add_to = None
        if isinstance(self._packed, fp8.Fp8Weight):
            product = fp8.linear(x, self._packed, bias, norm=norm, add_to=add_to, out=out)
        else:
            product = linear(x, self._packed, bias, norm=norm, add_to=add_to, out=out)
        return self._sum.all_reduce(product)

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
        self.parts = {name: Share.all(rows) for name, rows in parts.items()}

    def keep_parts(self, shares: Mapping[str, Share]) -> None:
        """Compute only these outputs of the named parts here; of the others all."""
        self.parts.update(shares)
        size = sum(share.size for share in self.parts.values())
        self.keep_rows(Share(0, size, self.weight.shape[0]))

    def parts_at(self, path: str) -> dict[str, Share]:
        parent = path.rpartition(".")[0]
        return {join(parent, name): rows for name, rows in self.parts.items()}
