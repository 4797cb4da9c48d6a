"""Measures, on the GPUs of this machine, which way of summing is best for which size, and writes `tuned/`.

    python -m baton.kernels.all_reduce.measure [--ranks N] [--out DIR]

One process a GPU. Times are of calls in a captured graph; every rank's graph has the same calls.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from baton.kernels.tune import as_json
from baton.kernels.tuned import LIBRARY, Entry, Options, device_name, entries, path_for

from . import gpu
from .gpu import Method
from .memory import Exchange, PeerMemory

SIZES = tuple(1 << bits for bits in range(12, 26))  # bytes
BLOCKS = (512, 1024, 2048, 4096)
ROOM_BYTES = 64 << 20  # so that it is not room that decides
CALLS, REPLAYS = 40, 15  # the same on every rank
MOST_BUFFERS_BYTES = 128 << 20


@dataclass(frozen=True)
class Times:
    """Of one size, in microseconds."""

    num_bytes: int
    library: float
    by_options: list[tuple[Options, float]]

    @property
    def best(self) -> Options:
        """The library's way is one of them."""
        options, elapsed = min(self.by_options, key=lambda pair: pair[1])
        return options if elapsed < self.library else {**options, "method": int(Method.LIBRARY)}

    def best_of(self, method: Method) -> tuple[int, float]:
        """(block, time)."""
        found = [(options["BLOCK"], elapsed) for options, elapsed in self.by_options if options["method"] == method]
        return min(found, key=lambda pair: pair[1])


def measure(memory: PeerMemory, device: torch.device, library: Callable[[torch.Tensor], object]) -> Iterator[Times]:
    """All sizes, smallest first. Called by all ranks at the same time."""
    for num_bytes in SIZES:
        copies = max(1, min(CALLS, MOST_BUFFERS_BYTES // num_bytes))
        buffers = [torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device) for _ in range(copies)]
        by_options = []
        for method, block in itertools.product((Method.ONE_SHOT, Method.TWO_SHOTS), BLOCKS):
            options = {"method": int(method), "BLOCK": block}
            if gpu.fitting_method(options, buffers[0], memory) is method:
                run = lambda x, options=options: gpu.all_reduce(x, memory, options)  # noqa: E731
                by_options.append((options, microseconds(run, buffers)))
        yield Times(num_bytes, microseconds(library, buffers), by_options)


def microseconds(run: Callable[[torch.Tensor], object], buffers: Sequence[torch.Tensor]) -> float:
    """Of one call, in the median over replays of a graph of them. Called by all ranks at the same time."""
    run(buffers[0])  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        for _, x in zip(range(CALLS), itertools.cycle(buffers), strict=False):
            run(x)
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


def entries_of(times: Sequence[Times], ranks: int) -> list[Entry]:
    return [Entry(gpu.tuning_key(ranks, of_size.num_bytes), of_size.best) for of_size in times]


def write(measured: Sequence[Entry], device: torch.device, root: Path = LIBRARY) -> Path:
    """Beside what is known of other numbers of ranks."""
    name = device_name(device)
    ranks = {entry.key["ranks"] for entry in measured}
    others = [entry for entry in entries("all_reduce", name) if entry.key["ranks"] not in ranks]
    path = path_for("all_reduce", name, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json([*others, *measured]))
    return path


def exchange_over(store: dist.Store, rank: int, size: int) -> Exchange:
    numbers = itertools.count()

    def exchange(words: str) -> list[str]:
        number = next(numbers)
        store.set(f"{number}/{rank}", words)
        return [store.get(f"{number}/{other}").decode() for other in range(size)]

    return exchange


def _measure_as(rank: int, size: int, folder: str, root: str) -> None:
    """In the process of one rank."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", size)
    group: Any = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, dist.ProcessGroupNCCL.Options())
    options = dist.AllreduceOptions()
    options.asyncOp = False
    memory = PeerMemory.share(rank, size, device, exchange_over(store, rank, size), room_bytes=ROOM_BYTES)
    found = []
    for times in measure(memory, device, lambda x: group.allreduce([x], options)):
        found.append(times)
        if rank == 0:
            ways = [f"{method.name.lower()} {times.best_of(method)}" for method in (Method.ONE_SHOT, Method.TWO_SHOTS)]
            print(f"{times.num_bytes:>9} bytes: library {times.library:.2f} us, {', '.join(ways)}", flush=True)
    if rank == 0:
        print(write(entries_of(found, size), device, Path(root)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m baton.kernels.all_reduce.measure", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="by default, one a GPU")
    parser.add_argument("--out", type=Path, default=LIBRARY, help="folder to write into instead of the library")
    given = parser.parse_args(arguments)
    if not 2 <= given.ranks <= torch.cuda.device_count():
        sys.exit(f"{given.ranks} ranks need as many GPUs, at least 2: there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_measure_as, (given.ranks, folder, str(given.out)), nprocs=given.ranks)


if __name__ == "__main__":
    main()
