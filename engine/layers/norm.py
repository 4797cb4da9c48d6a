"""RMSNorm (arXiv:1910.07467), and the residual stream that every layer reads through a norm and adds its output to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.parallel.groups import Group
from baton.kernels.linear import RowNorm
from baton.kernels.rms_norm import rms_norm

from .base import Layer, Parameter, Share, Slot
from .step_context import rows_at


class RMSNorm(Layer):
    """x / rms(x) * (offset + weight) over the last dimension.

    With an offset, `weight` holds `offset + weight`, so that kernels need no addition. It is float32, since the model's
    dtype would round the sum.
    """

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        self.weight = OffsetParameter(size, offset=offset) if offset else Parameter(size, typical=1.0)
        self.eps = eps

    @property
    def of_rows(self) -> RowNorm:
        """This norm as an argument of a linear layer, which then norms its input."""
        return RowNorm(self.weight.data, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        out = rms_norm(x, self.weight.data, self.eps)
        assert isinstance(out, Tensor)
        return out

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm of x + residual, x + residual), computed in one pass."""
        normed, total = rms_norm(x, self.weight.data, self.eps, residual)
        return normed, total


class OffsetParameter(Parameter):
    """A float32 parameter that holds the checkpoint's values plus `offset`."""

    __slots__ = ("offset",)

    def __init__(self, size: int, *, offset: float) -> None:
        super().__init__(size, dtype=torch.float32)
        self.offset = offset

    def slot(self, name: str, start: int = 0, rows: Share | None = None) -> Slot:
        return _OffsetSlot(name, self, start, rows)


class _OffsetSlot(Slot):
    __slots__ = ()

    def _place(self, share: Tensor) -> None:
        assert isinstance(self.parameter, OffsetParameter)
        super()._place(share.float() + self.parameter.offset)


def norms_over_ranks(parts: Sequence[tuple[RMSNorm, Tensor]], group: Group) -> list[Tensor]:
    """Normalize each tensor [T, N] by its norm over the full width, of which every rank of the group holds a part.

    All parts are equally wide. A part that several ranks hold is counted once per rank, which leaves the mean as it is.
    One all-reduce serves all tensors.
    """
    if group.size == 1:
        return [norm(x) for norm, x in parts]
    means = torch.stack([x.float().square().mean(-1) for _, x in parts])
    means = group.all_reduce(means) / group.size
    return [
        (x.float() * torch.rsqrt(mean[:, None] + norm.eps) * norm.weight.data.float()).to(x.dtype)
        for (norm, x), mean in zip(parts, means, strict=True)
    ]


class ResidualStream:
    """Hidden states [T, hidden_size], a sum that one layer after the other adds to.

        x, norm = stream.read(before)
        stream.take(layer(x, norm=norm, add_to=stream.target))      sum += layer(before(sum))
        stream.take(layer(x, norm=norm), after)                     sum += after(layer(before(sum)))

    in_place    a layer's last matrix product adds to the sum, and the next layer's first one norms it: adding and
                norming need no pass over the hidden states, and with few tokens no kernel
    otherwise   the last layer's result is kept beside the sum, until the next norm adds it in its own pass
    """

    def __init__(self, hidden: Tensor, *, in_place: bool) -> None:
        """Take ownership of `hidden`, which is written to."""
        self._sum = hidden
        self._last: Tensor | None = None
        self._after: RMSNorm | None = None  # the norm that produced `_last`, if any
        self._in_place = in_place

    @property
    def target(self) -> Tensor | None:
        """The tensor that the next layer adds its result to; None: it returns the result alone."""
        return self._sum if self._in_place else None

    def read(self, norm: RMSNorm | None) -> tuple[Tensor, RowNorm | None]:
        """Return the next layer's input, and the norm that the layer must still apply to it, if any."""
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
        """A copy of the sum, with the last layer's result added."""
        return self._sum.clone() if self._last is None else self._sum + self._last

    def take(self, result: Tensor, after: RMSNorm | None = None) -> None:
        """Take a layer's result. The layer has added it to `target`, unless a norm `after` follows."""
        assert self._last is None, "a layer reads the stream before it adds to it"
        if not self._in_place:
            self._last, self._after = (result if after is None else after(result)), after
        elif after is None:
            self._sum = result
        else:
            self._sum = self._sum.add_(after(result))

    def multiply(self, factor: Tensor) -> None:
        """Multiply the sum by a factor [1]."""
        self._add_last()
        self._sum = self._sum.mul_(factor)

    def _add_last(self) -> None:
        if self._last is None:
            return
        if self._after is None:
            self._sum = self._sum + self._last
        else:  # only the sum is needed, but unlike `+` this call can be recorded in a CPU graph
            _, self._sum = self._after.after_add(self._last, self._sum)
        self._last = None

    def keep(self, wanted: Tensor) -> None:
        """Drop all tokens but the `wanted` ones [R]. Must be called after `read`."""
        assert self._last is None, "call `read` before `keep`: an addition is pending"
        self._sum = rows_at(self._sum, wanted)
