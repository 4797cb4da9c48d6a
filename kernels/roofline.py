"""Roofline measurements: how close an op comes to the limits of the machine's memory and arithmetic.

A case declares the least bytes and FLOP that the op needs. The roof is the larger of the times that memory and
arithmetic need for these, both measured in the same run, on the same device (and with the same number of threads).
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

CACHES_BYTES = 256 << 20  # more than any device's last-level cache: cycling through this much data reads memory
MEASURE_S = {"cpu": 0.15, "cuda": 0.04}
MEASUREMENTS = 5
MOST_NODES = 256  # calls in one graph: enough that buffers of half a megabyte, cycled through, leave the last cache
GRAPH_S = 2e-3


@dataclass(frozen=True)
class BenchCase:
    """One op at one shape. `run` does it once; `num_bytes` and `flop` are the least that it must move and compute."""

    op: str
    shape: str
    dtype: torch.dtype
    device: torch.device
    run: Callable[[], object]
    num_bytes: float
    flop: float = 0.0


@dataclass(frozen=True)
class BenchRow:
    op: str
    shape: str
    dtype: str
    time_us: float
    num_bytes: float
    flop: float
    gb_s: float
    gflop_s: float
    bound: str  # "memory" or "compute": the limit that is reached first
    roof_share: float  # 1.0: no implementation can be faster


def measure(case: BenchCase) -> BenchRow:
    elapsed_s = seconds_per_call(case.run, case.device)
    memory_s = case.num_bytes / memory_bytes_per_s(case.device)
    compute_s = case.flop / flop_per_s(case.dtype, case.device) if case.flop else 0.0
    return BenchRow(
        op=case.op,
        shape=case.shape,
        dtype=str(case.dtype).removeprefix("torch."),
        time_us=elapsed_s * 1e6,
        num_bytes=case.num_bytes,
        flop=case.flop,
        gb_s=case.num_bytes / elapsed_s / 1e9,
        gflop_s=case.flop / elapsed_s / 1e9,
        bound="memory" if memory_s >= compute_s else "compute",
        roof_share=max(memory_s, compute_s) / elapsed_s,
    )


def seconds_per_call(run: Callable[[], object], device: torch.device, measure_s: float | None = None) -> float:
    """Measure the time of a call; on a GPU, over replays of a captured graph, so that launches on the CPU do not count.

    Takes about `measure_s`, by default `MEASURE_S`.
    """
    measure = _seconds_on_gpu if device.type == "cuda" else _seconds_on_cpu
    return measure(run, MEASURE_S[device.type] if measure_s is None else measure_s)


def _seconds_on_cpu(run: Callable[[], object], measure_s: float) -> float:
    """Return the best of a few measurements: everything that disturbs one makes it slower."""
    run()
    start = time.perf_counter()
    run()
    repeats = max(1, int(measure_s / MEASUREMENTS / max(time.perf_counter() - start, 1e-7)))
    best = float("inf")
    for _ in range(MEASUREMENTS):
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def _seconds_on_gpu(run: Callable[[], object], measure_s: float) -> float:
    run()  # compiles
    graph_of_one = _graph(run, 1)
    calls = min(MOST_NODES, max(1, int(GRAPH_S / _replay_seconds(graph_of_one))))
    graph = graph_of_one if calls == 1 else _graph(run, calls)
    replays = max(MEASUREMENTS, min(50, int(measure_s / _replay_seconds(graph))))
    return statistics.median(_replay_seconds(graph) for _ in range(replays)) / calls


def _graph(run: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    graph.replay()
    return graph


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def cycling(function: Callable[..., object], arguments: Iterable[Any]) -> Callable[[], object]:
    """Return a function that calls `function` with the next of `arguments` each time, to defeat hardware caches."""
    following = itertools.cycle(arguments)
    return lambda: function(next(following))


def copies_beyond_caches(num_bytes: int) -> int:
    """Return the number of buffers of this size that a case must cycle through so that it reads memory, not caches."""
    return max(1, -(-CACHES_BYTES // num_bytes))


@functools.cache
def memory_bytes_per_s(device: torch.device) -> float:
    """Measure the memory bandwidth: the better of copying (bytes read and written) and reading alone."""
    num_bytes = CACHES_BYTES if device.type == "cpu" else 4 * CACHES_BYTES
    source, target = (torch.ones(num_bytes // 4, dtype=torch.float32, device=device) for _ in range(2))
    copied = 2 * num_bytes / seconds_per_call(lambda: target.copy_(source), device)
    return max(copied, num_bytes / seconds_per_call(lambda: _read(source), device))


def _read(source: torch.Tensor) -> torch.Tensor:
    if source.is_cpu:
        return source.sum()
    from .streaming import read

    return read(source)


@functools.cache
def flop_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """Measure torch's own matrix product at a size that suits the device."""
    size = 1024 if device.type == "cpu" else 8192
    x, weight = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    run = functools.partial(_scaled_product if dtype.itemsize == 1 else torch.nn.functional.linear, x, weight)
    return 2 * size**3 / seconds_per_call(run, device)


def _scaled_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply in FP8 with fast accumulation: the fastest product of the device, used as a roof."""
    one = torch.ones((), device=x.device)
    return torch._scaled_mm(x, weight.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
