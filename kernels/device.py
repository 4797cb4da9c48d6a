"""What kernels ask of the device that they run on. On a CPU, where kernels are interpreted, there are small answers."""

from __future__ import annotations

import functools

import torch

_INTERPRETED_MULTIPROCESSORS = 4


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of one per multiprocessor run at the same time."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether it has Hopper's copy engine and its products of whole warp groups, which the kernels in Gluon use."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
