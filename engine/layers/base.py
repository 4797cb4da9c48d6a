"""Layers, their parameters, and the slots that checkpoint tensors go into.

    checkpoint tensor ──name──> Slot ──rows──> Parameter of a Layer ──finish()──> what the kernels read

A layer's attribute path is its name in the checkpoint (`model.layers.0.self_attn.q_norm.weight`). Where several
checkpoint tensors share one parameter (q, k and v in one matrix), the layer says so by offering several slots.

Layers are plain objects: inference needs neither autograd nor hooks, and a step makes hundreds of calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from baton.engine.models.errors import WeightsError


class Parameter:
    """A tensor that a checkpoint fills. Declared by its shape; memory comes with `allocate`, values with its slots."""

    __slots__ = ("_data", "dtype", "shape", "typical")

    def __init__(self, *shape: int, typical: float = 0.0, dtype: torch.dtype | None = None) -> None:
        self.shape = shape
        self.typical = typical  # the value around which a trained model's lie: dummy weights are drawn around it
        self.dtype = dtype  # None: the model's
        self._data: Tensor | None = None

    @property
    def data(self) -> Tensor:
        assert self._data is not None, "a parameter is read before allocate() or after release()"
        return self._data

    def allocate(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self._data = torch.empty(self.shape, device=device, dtype=self.dtype or dtype)

    def release(self) -> None:
        """Gives the memory back, once a packed copy serves."""
        self._data = None

    def slot(self, name: str, start: int = 0, rows: int | None = None) -> Slot:
        """Where the checkpoint tensor `name` goes that belongs to `rows` rows of the layer's output (None: all)."""
        return Slot(name, self, start, rows)


class Slot:
    """Where one checkpoint tensor goes: `rows` rows of a parameter, from `start` on, every `step`-th.

    With `item`, rows of that item of a stack [items, rows, ...].
    """

    __slots__ = ("item", "name", "parameter", "shape", "start", "step")

    def __init__(
        self,
        name: str,
        parameter: Parameter,
        start: int = 0,
        rows: int | None = None,
        *,
        step: int = 1,
        item: int | None = None,
    ) -> None:
        self.name = name  # in the checkpoint
        self.parameter = parameter
        self.start = start
        self.step = step
        self.item = item
        whole = parameter.shape if item is None else parameter.shape[1:]
        self.shape = (whole[0] if rows is None else rows, *whole[1:])

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """In a model of this type."""
        return self.num_elements * (self.parameter.dtype or dtype).itemsize

    @property
    def takes_8_bits(self) -> bool:
        """Whether what goes here is bits that are nothing without their scales."""
        return self.parameter.dtype is not None and self.parameter.dtype.itemsize == 1

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a checkpoint tensor of this shape can go here."""
        return shape == self.shape

    def place(self, tensor: Tensor) -> None:
        """Copies, converting type and device. Raises `WeightsError` for another shape."""
        if not self.accepts(tuple(tensor.shape)):
            raise WeightsError(f"{self.name} has shape {list(tensor.shape)}, must have {list(self.shape)}")
        whole = self.parameter.data if self.item is None else self.parameter.data[self.item]
        whole[self.start : self.start + self.shape[0] * self.step : self.step].copy_(tensor)


class Layer:
    """Parameters, layers and lists of layers as plain attributes."""

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """This layer's own, by attribute name."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield name, value

    def children(self) -> Iterator[tuple[str, Layer]]:
        """The layers directly below, by attribute name (`layers.0`, `layers.1`, ... for a list)."""
        for name, value in vars(self).items():
            if isinstance(value, Layer):
                yield name, value
            elif isinstance(value, list):
                yield from ((f"{name}.{index}", item) for index, item in enumerate(value) if isinstance(item, Layer))

    def slots(self, path: str = "") -> Iterator[Slot]:
        """Every checkpoint tensor that this layer and those below it are made of."""
        for name, parameter in self.parameters():
            yield parameter.slot(join(path, name))
        for name, child in self.children():
            yield from child.slots(join(path, name))

    def allocate(self, device: torch.device | str, dtype: torch.dtype) -> None:
        for _, parameter in self.parameters():
            parameter.allocate(device, dtype)
        for _, child in self.children():
            child.allocate(device, dtype)

    def finish(self) -> None:
        """Called once all slots are filled: lays weights out for the kernels, one layer at a time."""
        for _, child in self.children():
            child.finish()


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
