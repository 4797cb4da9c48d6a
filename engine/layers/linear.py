"""Linear layers. A `LinearMethod` (`layers.method`) defines how weights are stored, held in memory and multiplied.

There are two ways to divide a layer over ranks r. Each rank computes some outputs from all inputs (column-parallel in
Megatron's words), or a partial sum of all outputs from some inputs (row-parallel):

    keep_rows       y_r = x @ W[rows_r].T                              the next layer reads only y_r
    keep_columns    y = sum over r of x_r @ W[:, columns_r].T          one all-reduce
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from baton.engine.parallel.groups import ALONE, Group
from baton.kernels.linear import Activation, Pointwise, RowNorm

from .base import Layer, Parameter, Share, Slot, join
from .method import PLAIN, LinearMethod, LinearWeight, multiply_stretches


class Linear(Layer):
    """y [T, N] = x [T, K] @ weight [N, K].T + bias [N]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        self.rows, self.columns = Share.all(out_features), Share.all(in_features)  # of the weight, on this rank
        self.bias = Parameter(out_features) if bias else None
        self.packed: LinearWeight | None = None
        self._sum: Group = ALONE  # the group whose products are summed
        self._adds = True  # whether this rank adds the bias and `add_to`: one rank of the group does
        self.use(PLAIN)

    def use(self, method: LinearMethod) -> None:
        """Store, hold and multiply the weight by this method. Must be called before `allocate`."""
        self.method = method
        self.weights = method.declare(self.rows, self.columns)

    @property
    def out_features(self) -> int:
        """The number of outputs on this rank."""
        return self.rows.size

    @property
    def in_features(self) -> int:
        """The number of inputs on this rank."""
        return self.columns.size

    def parts_at(self, path: str) -> dict[str, Share]:
        """Return the names of the checkpoint's layers behind this one at `path`, and the outputs of each held here."""
        return {path: self.rows}

    def keep_rows(self, share: Share) -> None:
        """Compute only these outputs here."""
        assert share.whole == self.rows.size, f"a share of {share.whole} outputs, where there are {self.rows.size}"
        self.rows = share
        self.use(self.method)
        if self.bias is not None:
            self.bias.keep(0, share)

    def keep_columns(self, share: Share, group: Group, *, summed: bool = True) -> None:
        """Read only these inputs; the other ranks of the group read the others.

        The layer sums results over the group. With `summed=False`, the caller does.
        """
        assert share.whole == self.columns.size, f"a share of {share.whole} inputs, where there are {self.columns.size}"
        self.columns = share
        self.use(self.method)
        self._adds = group.rank == 0
        self._sum = group if summed else ALONE

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self.weights.items()
        yield from super().parameters()

    def slots(self, path: str = "") -> Iterator[Slot]:
        for name, parameter in self.parameters():
            start = 0
            for part, rows in self.parts_at(path).items():
                yield parameter.slot(join(part, name), start, rows)
                start += rows.size

    def multiply_rows(self, factors: Sequence[tuple[int, float]]) -> None:
        """Multiply successive runs of outputs, given as (number of outputs, factor), by their factors.

        Weights and biases are multiplied and rounded to their dtype. Called once all slots are filled, before `finish`.
        """
        if all(factor == 1.0 for _, factor in factors):
            return
        self.method.multiply_rows({name: parameter.data for name, parameter in self.weights.items()}, factors)
        if self.bias is not None:
            multiply_stretches(self.bias.data, factors)

    def reorder_rows(self, order: Tensor) -> None:
        """Make output i what output `order[i]` was. Called once all slots are filled, before `finish`."""
        self.method.reorder_rows({name: parameter.data for name, parameter in self.weights.items()}, order)
        if self.bias is not None:
            self.bias.data.copy_(self.bias.data[order])

    def finish(self) -> None:
        self.packed = self.method.pack({name: parameter.data for name, parameter in self.weights.items()})
        for parameter in self.weights.values():
            parameter.release()

    def __call__(
        self,
        x: Tensor,
        *,
        activation: Activation | Pointwise | None = None,
        norm: RowNorm | None = None,
        add_to: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiply, fused with the operations before and after the product: see `LinearWeight.multiply`.

        A layer with divided columns adds the `add_to` of the group's first rank only, and may return another tensor.
        It must not have an activation, since its results are summed over ranks.
        """
        assert self.packed is not None, "finish() comes before the first call"
        bias = None if self.bias is None or not self._adds else self.bias.data
        if not self._adds:
            add_to = None
        product = self.packed.multiply(x, bias, activation=activation, norm=norm, add_to=add_to, out=out)
        return self._sum.all_reduce(product)


class MergedLinear(Linear):
    """Several linear layers with the same input as one matrix, their outputs concatenated.

    `parts` maps the name of each in the checkpoint, a sibling of this layer, to its output size.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = {name: Share.all(rows) for name, rows in parts.items()}

    def keep_parts(self, shares: Mapping[str, Share]) -> None:
        """Compute only these outputs of the named parts here, and all outputs of the other parts."""
        self.parts.update(shares)
        size = sum(share.size for share in self.parts.values())
        self.keep_rows(Share(0, size, self.rows.size))

    def parts_at(self, path: str) -> dict[str, Share]:
        parent = path.rpartition(".")[0]
        return {join(parent, name): rows for name, rows in self.parts.items()}
