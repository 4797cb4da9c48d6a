"""One copy to the device for all the small tensors of a step."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_ALIGNMENT = 16  # bytes: where Triton and vector loads may assume that a tensor starts


def upload(record: T, device: torch.device) -> T:
    """`record` with each of its host tensors, also those in dataclasses within, on `device`.

    They travel in one pinned buffer, which torch takes back when the copy is done: nobody waits. Tensors that are on a
    device already stay as they are, and so does everything on a CPU.
    """
    if device.type == "cpu":
        return record
    found: list[Tensor] = []
    _collect(record, found)
    ends = [0]
    for tensor in found:
        ends.append(ends[-1] + -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT)
    pinned = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, start in zip(found, ends, strict=False):
        _view(pinned, start, tensor).copy_(tensor)
    copied = pinned.to(device, non_blocking=True)
    views = iter([_view(copied, start, tensor) for tensor, start in zip(found, ends, strict=False)])
    return _rebuilt(record, views)


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """`buffer` from byte `start` on as a tensor of another's type and shape."""
    return buffer[start : start + like.numel() * like.itemsize].view(like.dtype).view(like.shape)


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.device.type == "cpu":
            found.append(value)
    elif is_dataclass(value):
        for field in fields(value):
            _collect(getattr(value, field.name), found)


def _rebuilt(value: Any, views: Any) -> Any:
    """`value` with its host tensors, in the order of `_collect`, taken from `views`."""
    if isinstance(value, Tensor):
        return next(views) if value.device.type == "cpu" else value
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{name: _rebuilt(part, views) for name, part in parts.items()})
    return value
