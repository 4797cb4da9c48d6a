"""The sum that runs through a decoder: every layer reads it through a norm and adds to it."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.linear import RowNorm

from .base import rows_at
from .norm import RMSNorm


class ResidualStream:
    """Hidden states [T, hidden_size], to which one layer after the other adds.

        x, norm = stream.read(before)
        stream.take(layer(x, norm=norm, add_to=stream.target))      the layer of before(sum), added to the sum
        stream.take(layer(x, norm=norm), behind)                    behind(the layer of before(sum)), added to the sum

    in_place    the product that ends a layer adds to the sum, and the one that begins the next norms it: no pass of
                their own over the hidden states, and with few tokens no kernels of their own
    otherwise   what the last layer gave waits beside the sum; the next norm adds it in the same pass
    """

    def __init__(self, hidden: Tensor, *, in_place: bool) -> None:
        """Take over `hidden`, which is written to."""
        self._sum = hidden
        self._last: Tensor | None = None
        self._behind: RMSNorm | None = None  # the norm that the last result has gone through
        self._in_place = in_place

    @property
    def target(self) -> Tensor | None:
        """Return the tensor to which the next layer adds its result; None where it returns the result alone."""
        return self._sum if self._in_place else None

    def read(self, norm: RMSNorm | None) -> tuple[Tensor, RowNorm | None]:
        """Return the next layer's input, and the norm that it has to go through first, if it has not yet."""
        if norm is None:
            self._add_last()
            return self._sum, None
        return (self._sum, norm.of_rows) if self._in_place else (self.normed(norm), None)

    def normed(self, norm: RMSNorm) -> Tensor:
        """Return the norm of the sum."""
        if self._last is None:
            return norm(self._sum)
        normed, self._sum = norm.after_add(self._last, self._sum)
        self._last = None
        return normed

    @property
    def total(self) -> Tensor:
        """The sum with all that was added to it, in memory of its own."""
        return self._sum.clone() if self._last is None else self._sum + self._last

    def take(self, result: Tensor, behind: RMSNorm | None = None) -> None:
        """Take the result of a layer that had `target` to add to, or none where a norm follows it."""
        assert self._last is None, "a layer reads the stream before it adds to it"
        if not self._in_place:
            self._last, self._behind = (result if behind is None else behind(result)), behind
        elif behind is None:
            self._sum = result
        else:
            self._sum = self._sum.add_(behind(result))

    def multiply(self, factor: Tensor) -> None:
        """Multiply the sum by a factor [1]."""
        self._add_last()
        self._sum = self._sum.mul_(factor)

    def _add_last(self) -> None:
        if self._last is None:
            return
        if self._behind is None:
            self._sum = self._sum + self._last
        else:  # of the two that this gives only the sum is wanted, but it is a call that CPU graphs can record
            _, self._sum = self._behind.after_add(self._last, self._sum)
        self._last = None

    def keep(self, wanted: Tensor) -> None:
        """Let only the `wanted` tokens [R] go on. Comes after the stream was read."""
        assert self._last is None, "what waits has to be added first"
        self._sum = rows_at(self._sum, wanted)
