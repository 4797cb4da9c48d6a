"""Functions of single values that give a value the same result wherever it lies in a tensor, also on a CPU.

On a CPU, torch computes as many values at once as two vector registers hold, and what is left at the end of a tensor,
or of a thread's part of it, one by one with another function, which rounds otherwise. So a token's values would depend
on how many tokens are in the step. Here a tensor on a CPU is filled up to whole registers for every thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

# A multiple of what two registers hold: 32 values in float32, 64 in bfloat16, fewer in float64 and on older CPUs.
_AT_ONCE = 64
_THREAD_VALUES = 32_768  # torch's least number for another thread (`at::internal::GRAIN_SIZE`)
_GELU_VALUES = 16_384  # from here on GELU takes all threads


def sigmoid(x: Tensor) -> Tensor:
    return _in_whole_registers(torch.sigmoid, x)


def silu(x: Tensor) -> Tensor:
    return _in_whole_registers(functional.silu, x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU by its approximation with a tanh."""
    return _in_whole_registers(lambda values: functional.gelu(values, approximate="tanh"), x)


def _in_whole_registers(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if not x.is_cpu:
        return function(x)
    count, num_threads = x.numel(), torch.get_num_threads()
    num_parts = min(num_threads, max(1, -(-count // _THREAD_VALUES)))
    if count > _GELU_VALUES:
        num_parts = math.lcm(num_parts, num_threads)
    missing = -count % (_AT_ONCE * num_parts)
    if not missing:
        return function(x.contiguous())
    return function(functional.pad(x.flatten(), (0, missing)))[:count].view(x.shape)
