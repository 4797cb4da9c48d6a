"""How near an op comes to what its machine can do at all.

A case declares what the op must at least move and compute. The roof is the larger of the times that memory and
multipliers need for that, both measured here and now, on the same device with the same number of threads.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

CACHES_BYTES = 256 << 20  # more than the last cache of any CPU that this runs on: who cycles through it reads memory
MEASURE_S = 0.15
MEASUREMENTS = 5


@dataclass(frozen=True)
class BenchCase:
    """One op at one shape. `run` does it once; `num_bytes` and `flop` are the least that it can move and compute."""

    op: str
    shape: str
    dtype: torch.dtype
    run: Callable[[], object]
    num_bytes: float
    flop: float = 0.0


@dataclass(frozen=True)
class BenchRow:
    op: str
    shape: str
    dtype: str
    time_us: float
    gb_s: float
    gflop_s: float
    bound: str  # "memory" or "compute": which roof is the nearer one
    roof_share: float  # 1.0: no implementation can be faster


def measure(case: BenchCase) -> BenchRow:
    elapsed_s = seconds_per_call(case.run)
    memory_s = case.num_bytes / memory_bytes_per_s()
    compute_s = case.flop / flop_per_s(case.dtype) if case.flop else 0.0
    return BenchRow(
        op=case.op,
        shape=case.shape,
        dtype=str(case.dtype).removeprefix("torch."),
        time_us=elapsed_s * 1e6,
        gb_s=case.num_bytes / elapsed_s / 1e9,
        gflop_s=case.flop / elapsed_s / 1e9,
        bound="memory" if memory_s >= compute_s else "compute",
        roof_share=max(memory_s, compute_s) / elapsed_s,
    )


def seconds_per_call(run: Callable[[], object]) -> float:
    """The best of a few measurements: everything that disturbs one makes it slower."""
    run()
    start = time.perf_counter()
    run()
    repeats = max(1, int(MEASURE_S / MEASUREMENTS / max(time.perf_counter() - start, 1e-7)))
    best = float("inf")
    for _ in range(MEASUREMENTS):
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def cycling(function: Callable[..., object], arguments: Iterable[Any]) -> Callable[[], object]:
    """A run that takes the next of `arguments` each time, over and over: pass so many that no cache holds them."""
    following = itertools.cycle(arguments)
    return lambda: function(next(following))


def copies_beyond_caches(num_bytes: int) -> int:
    """How many buffers of this size a case should cycle through to be sure that it reads memory."""
    return max(1, -(-CACHES_BYTES // num_bytes))


@functools.cache
def memory_bytes_per_s() -> float:
    """The better of copying (bytes read and written) and reading alone."""
    source, target = (torch.ones(CACHES_BYTES // 4, dtype=torch.float32) for _ in range(2))
    copied = 2 * CACHES_BYTES / seconds_per_call(lambda: target.copy_(source))
    return max(copied, CACHES_BYTES / seconds_per_call(source.sum))


@functools.cache
def flop_per_s(dtype: torch.dtype) -> float:
    """What torch's own matrix product reaches at a size that suits it."""
    rows, columns, depth = 1024, 1024, 1024
    x, weight = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)
    return 2 * rows * columns * depth / seconds_per_call(lambda: torch.nn.functional.linear(x, weight))
