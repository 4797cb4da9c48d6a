"""Measures, on the GPUs of this machine, which way of each op is best for which size, and writes `tuned/`.

    python -m baton.kernels.peers.measure [OP ...] [--ranks N] [--out DIR]

One process a GPU. Times are of calls in a captured graph; every rank's graph has the same calls. Sizes are those of
what a rank gives: all_gather brings as much from each rank, reduce_scatter a part of it. dispatch and combine are of
tokens with experts at random, beside the same step by all_gather and reduce_scatter.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions  # `torch.distributed` forgets to name it

from baton.kernels.tune import as_json
from baton.kernels.tuned import LIBRARY, Entry, Options, device_name, entries, path_for

from .cases import BLOCKS, Case, Collective, Run, cases_of
from .memory import Exchange, PeerMemory
from .options import METHODS, Method, Op, tuning_key

ROOM_BYTES = 64 << 20  # so that it is not room that decides
CALLS, REPLAYS = 40, 15  # the same on every rank


@dataclass(frozen=True)
class Times:
    """Of one op and size, in microseconds. `otherwise`: of what would serve in its place."""

    op: Op
    num_bytes: int
    otherwise: Mapping[str, float]
    by_options: list[tuple[Options, float]]

    @property
    def best(self) -> Options:
        """The method is the library's where one of the other ways is faster."""
        if not self.by_options:
            return {"method": int(Method.LIBRARY), "BLOCK": BLOCKS[0]}
        options, elapsed = min(self.by_options, key=lambda pair: pair[1])
        return options if elapsed < min(self.otherwise.values()) else {**options, "method": int(Method.LIBRARY)}

    def __str__(self) -> str:
        said = [f"{name} {elapsed:.2f} us" for name, elapsed in self.otherwise.items()]
        for method in METHODS[self.op]:
            found = [(elapsed, options["BLOCK"]) for options, elapsed in self.by_options if options["method"] == method]
            if found:
                elapsed, block = min(found)
                said.append(f"{method.name.lower()} {elapsed:.2f} us with blocks of {block}")
        return f"{self.op} {self.num_bytes:>9} bytes: {', '.join(said)}"


def measure(case: Case) -> Times:
    """Called by all ranks at the same time."""
    otherwise = {name: microseconds(run, case.buffers) for name, run in case.otherwise.items()}
    by_options = [(options, microseconds(run, case.buffers)) for options, run in case.by_options]
    return Times(case.op, case.num_bytes, otherwise, by_options)


def microseconds(run: Run, buffers: Sequence[Any]) -> float:
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
    return [Entry(tuning_key(of_size.op, ranks, of_size.num_bytes), of_size.best) for of_size in times]


def write(measured: Sequence[Entry], device: torch.device, root: Path = LIBRARY) -> Path:
    """Beside what is known of other ops and numbers of ranks."""
    name = device_name(device)
    again = {(entry.key["op"], entry.key["ranks"]) for entry in measured}
    others = [entry for entry in entries("peers", name) if (entry.key["op"], entry.key["ranks"]) not in again]
    path = path_for("peers", name, root)
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


def nccl_runs(group: Any) -> dict[Op, Collective]:
    """What the library does for each op that it has, in the current stream."""
    total, gather, scatter = dist.AllreduceOptions(), AllgatherOptions(), dist.ReduceScatterOptions()
    for options in (total, gather, scatter):
        options.asyncOp = False
    size = group.size()

    def all_reduce(x: Tensor) -> Tensor:
        group.allreduce([x], total)
        return x

    def all_gather(x: Tensor) -> Tensor:
        gathered = x.new_empty(size * x.shape[0], *x.shape[1:])
        group._allgather_base(gathered, x, gather)
        return gathered

    def reduce_scatter(x: Tensor) -> Tensor:
        own = x.new_empty(x.shape[0] // size, *x.shape[1:])
        group._reduce_scatter_base(own, x, scatter)
        return own

    return {Op.ALL_REDUCE: all_reduce, Op.ALL_GATHER: all_gather, Op.REDUCE_SCATTER: reduce_scatter}


def _measure_as(rank: int, size: int, folder: str, root: str, ops: Sequence[Op]) -> None:
    """In the process of one rank."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", size)
    group: Any = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, dist.ProcessGroupNCCL.Options())
    library = nccl_runs(group)
    memory = PeerMemory.share(rank, size, device, exchange_over(store, rank, size), room_bytes=ROOM_BYTES)
    found = []
    for op in ops:
        for case in cases_of(op, memory, device, library):
            found.append(measure(case))
            if rank == 0:
                print(found[-1], flush=True)
    if rank == 0:
        print(write(entries_of(found, size), device, Path(root)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m baton.kernels.peers.measure", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"of {', '.join(Op)}; by default all")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="by default, one a GPU")
    parser.add_argument("--out", type=Path, default=LIBRARY, help="folder to write into instead of the library")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.ops) - set(Op)):
        parser.error(f"no such op: {', '.join(unknown)}; choose from {', '.join(Op)}")
    if not 2 <= given.ranks <= torch.cuda.device_count():
        sys.exit(f"{given.ranks} ranks need as many GPUs, at least 2: there are {torch.cuda.device_count()}")
    ops = [Op(name) for name in given.ops] or list(Op)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_measure_as, (given.ranks, folder, str(given.out), ops), nprocs=given.ranks)


if __name__ == "__main__":
    main()
