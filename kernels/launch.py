"""Host-side arithmetic for kernel launches: grid sizes, and device properties that launches depend on.

A CPU, on which Triton interprets kernels, counts as a small device without Hopper's features.
"""

from __future__ import annotations

import functools

import torch

_INTERPRETED_MULTIPROCESSORS = 4


def cdiv(whole: int, part: int) -> int:
    """Divide and round up. Triton's function of this name is forty times slower on the host."""
    return -(-whole // part)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n; 1 for 0. Triton's function is forty times slower on the host."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return whether the device has TMA and warp-group products (WGMMA), which the Gluon kernels need."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
