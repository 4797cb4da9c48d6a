"""Layers, their parameters, and the slots that load checkpoint tensors into parameters.

    checkpoint tensor ──name──> Slot ──share, rows──> Parameter of a Layer ──finish()──> the layout that kernels read

A layer's attribute path is its name in the checkpoint (`model.layers.0.self_attn.q_norm.weight`). A parameter that is
made of several checkpoint tensors (q, k and v in one matrix) has a slot for each of them.

A model is first constructed whole, without knowledge of ranks. Then `divide` reduces each layer to one rank's part,
before memory is allocated: parameters shrink, and each slot takes only a share of its checkpoint tensor. Feed-forward
layers also get `TokenRows` (`layers.step_context`), since experts may compute the tokens of other data-parallel ranks.

Layers are plain objects, not `nn.Module`s: inference needs neither autograd nor hooks, and a step makes hundreds of
calls. Importing this module does not import torch, because model files import it where only configs are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

from baton.engine.hf_config.errors import WeightsError
from baton.engine.parallel.groups import Group, ParallelGroups

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Share:
    """One rank's share of one dimension of a checkpoint tensor: one contiguous range, or several (`sections`)."""

    start: int
    size: int
    whole: int
    sections: tuple[Share, ...] = ()  # the ranges, in order, if there are several; () for one range

    @classmethod
    def all(cls, whole: int) -> Share:
        return cls(0, whole, whole)

    @classmethod
    def part(cls, whole: int, group: Group) -> Share:
        """Return this rank's part of a dimension that is divided into equal parts, in rank order."""
        size, rest = divmod(whole, group.size)
        assert not rest, f"{whole} does not divide by {group.size}: `check_division` comes before layers are divided"
        return cls(group.rank * size, size, whole)

    @classmethod
    def of_sections(cls, shares: Sequence[Share]) -> Share:
        """Return the share of a dimension that is a concatenation of sections, given the share of each section."""
        whole, stretches = sum(share.whole for share in shares), list[Share]()
        behind = 0
        for share in shares:
            stretches.append(cls(behind + share.start, share.size, whole))
            behind += share.whole
        return cls(0, sum(share.size for share in shares), whole, tuple(stretches))

    @classmethod
    def of_parts(cls, items: Share, widths: Sequence[int]) -> Share:
        """Return the share of `items`, reordered by part, in a dimension that is stored item by item.

        Each item has one part of each width in `widths`. The ranges of the share are the first parts of all items, then
        the second parts, and so on.
        """
        size, starts = sum(widths), accumulate(widths, initial=0)
        whole = items.whole * size
        stretches = tuple(
            cls(item * size + start, width, whole)
            for start, width in zip(starts, widths, strict=False)
            for item in range(items.start, items.end)
        )
        return cls(0, items.size * size, whole, stretches)

    @property
    def stretches(self) -> tuple[Share, ...]:
        return self.sections or (self,)

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def slice(self) -> slice:
        """One slice of the dimension that contains the whole share."""
        return slice(0, self.whole) if self.sections else slice(self.start, self.end)

    def times(self, width: int) -> Share:
        """Return the same share of a dimension in which each element has become `width` elements."""
        return Share(self.start * width, self.size * width, self.whole * width)


class Parameter:
    """A tensor with values from a checkpoint. It has a shape at first; `allocate` adds memory, its slots add values."""

    __slots__ = ("_data", "dtype", "shares", "typical")

    def __init__(self, *shape: int, typical: float = 0.0, dtype: torch.dtype | None = None) -> None:
        self.shares = tuple(Share.all(size) for size in shape)  # of each dimension
        self.typical = typical  # the usual value in a trained model: dummy weights are drawn around it
        self.dtype = dtype  # None: the model's dtype
        self._data: Tensor | None = None

    @staticmethod
    def part(*shares: Share, typical: float = 0.0, dtype: torch.dtype | None = None) -> Parameter:
        """Declare a parameter by this rank's share of each dimension."""
        parameter = Parameter(*(share.whole for share in shares), typical=typical, dtype=dtype)
        parameter.shares = shares
        return parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rank's share."""
        return tuple(share.size for share in self.shares)

    def keep(self, dimension: int, share: Share) -> None:
        """Hold only this share of the dimension. Must be called before `allocate`."""
        before = self.shares[dimension].size
        assert share.whole == before, f"a share of {share.whole}, where there are {before}"
        shares = list(self.shares)
        shares[dimension] = share
        self.shares = tuple(shares)

    @property
    def has_data(self) -> bool:
        """False before `allocate`, and after `release`."""
        return self._data is not None

    @property
    def data(self) -> Tensor:
        assert self._data is not None, "a parameter is read before allocate() or after release()"
        return self._data

    def allocate(self, device: torch.device | str, dtype: torch.dtype) -> None:
        import torch

        self._data = torch.empty(self.shape, device=device, dtype=self.dtype or dtype)

    def release(self) -> None:
        """Free the memory, once a packed copy has replaced it."""
        self._data = None

    def slot(self, name: str, start: int = 0, rows: Share | None = None) -> Slot:
        """Return a slot for checkpoint tensor `name`, whose `rows` go to rows `start`... of this parameter.

        `rows` None means all rows.
        """
        return Slot(name, self, start, rows)


class Slot:
    """Loads one checkpoint tensor: its `rows` go to rows `start`, `start + step`, ... of a parameter.

    With `item`, the parameter is a stack [items, rows, ...], and the rows go to that item. A slot with an empty share
    is for a tensor that only other ranks hold: the checkpoint must contain it, but this rank does not read it.
    """

    __slots__ = ("item", "name", "parameter", "shares", "start", "step")

    stored_as: tuple[str, ...] = ()  # allowed safetensors dtypes of the checkpoint tensor; (): any floating-point type

    def __init__(
        self,
        name: str,
        parameter: Parameter,
        start: int = 0,
        rows: Share | None = None,
        *,
        step: int = 1,
        item: int | None = None,
    ) -> None:
        self.name = name  # in the checkpoint
        self.parameter = parameter
        self.start = start
        self.step = step
        self.item = item
        held = parameter.shares if item is None else parameter.shares[1:]
        self.shares = held if rows is None else (rows, *held[1:])  # one for each dimension of the checkpoint tensor

    @classmethod
    def elsewhere(cls, name: str, shape: Sequence[int], parameter: Parameter) -> Slot:
        """Return a slot for a checkpoint tensor of this shape that only other ranks hold, in their `parameter`."""
        slot = cls(name, parameter)
        slot.shares = tuple(Share(0, 0, size) for size in shape)
        return slot

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole checkpoint tensor."""
        return tuple(share.whole for share in self.shares)

    @property
    def share_shape(self) -> tuple[int, ...]:
        """The shape of this rank's share of it."""
        return tuple(share.size for share in self.shares)

    @property
    def num_elements(self) -> int:
        """The number of values in this rank's share."""
        return math.prod(self.share_shape)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the number of bytes that it fills in a model of this dtype."""
        return self.num_elements * (self.parameter.dtype or dtype).itemsize

    @property
    def takes_8_bits(self) -> bool:
        """True if the parameter keeps 8-bit codes, which mean nothing without their scales."""
        return self.parameter.dtype is not None and self.parameter.dtype.itemsize == 1

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Return whether the slot can load a checkpoint tensor of this shape."""
        return shape == self.shape

    def index(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return slices of the checkpoint tensor that contain this rank's share; () if the whole tensor is needed."""
        if all(share.slice == slice(0, share.whole) for share in self.shares):
            return ()
        return tuple(share.slice for share in self.shares)

    def place(self, tensor: Tensor) -> None:
        """Copy a checkpoint tensor, or this rank's share of it, into the parameter; convert its dtype and device.

        Raises `WeightsError` if the tensor has another shape.
        """
        self._place(self._cut(tensor))

    def _cut(self, tensor: Tensor) -> Tensor:
        shape = tuple(tensor.shape)
        if shape == self.share_shape and not any(share.sections for share in self.shares):
            return tensor
        if not self.accepts(shape):
            raise WeightsError(f"{self.name} has shape {list(shape)}, must have {list(self.shape)}")
        part = tensor[self.index(shape)]
        for dimension, share in enumerate(self.shares):
            if share.sections:
                import torch

                part = torch.cat([part.narrow(dimension, each.start, each.size) for each in share.sections], dimension)
        return part

    def _place(self, share: Tensor) -> None:
        target = self.parameter.data if self.item is None else self.parameter.data[self.item]
        target[self.start : self.start + len(share) * self.step : self.step].copy_(share)


class Layer:
    """A part of a model, with parameters, layers and lists of layers as plain attributes."""

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield this layer's own parameters by attribute name."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield name, value

    def children(self) -> Iterator[tuple[str, Layer]]:
        """Yield the layers directly below by attribute name (`layers.0`, `layers.1`, ... for a list)."""
        for name, value in vars(self).items():
            if isinstance(value, Layer):
                yield name, value
            elif isinstance(value, list):
                yield from ((f"{name}.{index}", item) for index, item in enumerate(value) if isinstance(item, Layer))

    def slots(self, path: str = "") -> Iterator[Slot]:
        """Yield a slot for every checkpoint tensor that this layer and the layers below it are loaded from."""
        for name, parameter in self.parameters():
            yield parameter.slot(join(path, name))
        for name, child in self.children():
            yield from child.slots(join(path, name))

    def divide(self, groups: ParallelGroups) -> None:
        """Reduce this layer to the rank's share, before `allocate`. By default only its children are divided."""
        for _, child in self.children():
            child.divide(groups)

    def allocate(self, device: torch.device | str, dtype: torch.dtype) -> None:
        for _, parameter in self.parameters():
            parameter.allocate(device, dtype)
        for _, child in self.children():
            child.allocate(device, dtype)

    def finish(self) -> None:
        """Bring the weights into the kernels' layout, one layer at a time. Called once all slots are filled."""
        for _, child in self.children():
            child.finish()


Kind = TypeVar("Kind", bound=Layer)


def layers_of(kind: type[Kind], layer: Layer, path: str = "") -> list[tuple[str, Kind]]:
    """Return the path and the layer of every instance of `kind` in the tree of `layer`, itself included."""
    found = [(path, layer)] if isinstance(layer, kind) else []
    for name, child in layer.children():
        found += layers_of(kind, child, join(path, name))
    return found


def join(path: str, name: str) -> str:
    """Return the path of a layer's part. With an empty name, the part has the path of the layer."""
    return f"{path}.{name}" if path and name else path or name


class Held:
    """The items (experts) that a rank holds of a stack of `whole` items, in the order in which they lie in memory."""

    def __init__(self, items: Sequence[int], whole: int) -> None:
        assert len(set(items)) == len(items), "an item lies in one place of a rank"
        self.items = tuple(items)
        self.whole = whole
        first = min(items, default=0)
        self.places = Share(0, len(self.items), whole)  # first dimension of a parameter with an entry for each item
        self.share = Share(first, max(items, default=-1) + 1 - first, whole)  # the smallest range with all items


class StackSlot(Slot):
    """Loads the held items of a checkpoint's stack."""

    __slots__ = ("_held",)

    def __init__(self, name: str, parameter: Parameter, held: Held) -> None:
        super().__init__(name, parameter)
        self.shares = (held.share, *parameter.shares[1:])
        self._held = held

    def _place(self, share: Tensor) -> None:
        for target, index in zip(self.parameter.data, self._held.items, strict=True):
            # Copied to the device first, so that subclasses convert the item there.
            self._place_item(target, share[index - self._held.share.start].to(target.device))

    def _place_item(self, target: Tensor, item: Tensor) -> None:
        target.copy_(item)
