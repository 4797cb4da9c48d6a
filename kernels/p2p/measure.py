"""Measures the best algorithm of each collective and size on this machine's GPUs, and writes `tuned/`.

    python -m baton.kernels.p2p.measure [OP ...] [--ranks N] [--out DIR]

There is one process per GPU. Calls are timed in a captured graph, the same on all ranks. Sizes are of a rank's input:
all_gather receives as much from each rank, reduce_scatter a part of it. dispatch and combine are measured with random
experts, and compared with all_gather and reduce_scatter.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions  # `torch.distributed` forgets to name it

from baton.kernels.expert_map import ExpertMap, map_experts
from baton.kernels.tune import as_json
from baton.kernels.tuned import LIBRARY, Entry, Options, device_name, entries, path_for

from . import gpu
from .options import METHODS, Algorithm, Op, fitting_method, tuning_key
from .peer_memory import Exchange, PeerMemory
from .token_exchange import RankSlots, RoutedTokens

ROOM_BYTES = 64 << 20  # large enough that it does not limit a method
CALLS, REPLAYS = 40, 15  # the same on every rank
SIZES = tuple(1 << bits for bits in range(12, 26))  # bytes
BLOCKS = (512, 1024, 2048, 4096)
MOST_BUFFERS, MOST_BUFFERS_BYTES = 40, 128 << 20

# Qwen3-30B-A3B; numbers of tokens of a rank, beyond which there is no room
HIDDEN, EXPERTS, TOP_K = 2048, 128, 8
TOKENS = tuple(1 << bits for bits in range(11))

Run = Callable[[Any], Any]
Collective = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Times:
    """Times of one op and size, in microseconds. `otherwise` has the times of alternatives."""

    op: Op
    num_bytes: int
    otherwise: Mapping[str, float]
    by_options: list[tuple[Options, float]]

    @property
    def best(self) -> Options:
        """The fastest options; their method is LIBRARY if an alternative is faster."""
        if not self.by_options:
            return {"method": int(Algorithm.LIBRARY), "BLOCK": BLOCKS[0]}
        options, elapsed = min(self.by_options, key=lambda pair: pair[1])
        return options if elapsed < min(self.otherwise.values()) else {**options, "method": int(Algorithm.LIBRARY)}

    def __str__(self) -> str:
        said = [f"{name} {elapsed:.2f} us" for name, elapsed in self.otherwise.items()]
        for method in METHODS[self.op]:
            found = [(elapsed, options["BLOCK"]) for options, elapsed in self.by_options if options["method"] == method]
            if found:
                elapsed, block = min(found)
                said.append(f"{method.name.lower()} {elapsed:.2f} us with blocks of {block}")
        return f"{self.op} {self.num_bytes:>9} bytes: {', '.join(said)}"


def measure(case: Case) -> Times:
    """Measure a case. Called by all ranks at the same time."""
    otherwise = {name: microseconds(run, case.buffers) for name, run in case.otherwise.items()}
    by_options = [(options, microseconds(run, case.buffers)) for options, run in case.by_options]
    return Times(case.op, case.num_bytes, otherwise, by_options)


def microseconds(run: Run, buffers: Sequence[Any]) -> float:
    """Return the time of one call: the median over replays of a captured graph. Called by all ranks at the
    same time.
    """
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
    """Write the entries beside those of other ops and numbers of ranks."""
    name = device_name(device)
    again = {(entry.key["op"], entry.key["ranks"]) for entry in measured}
    others = [entry for entry in entries("p2p", name) if (entry.key["op"], entry.key["ranks"]) not in again]
    path = path_for("p2p", name, root)
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
    """Return NCCL's function of each op that it has, in the current stream."""
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
    """Measure in the process of one rank."""
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


@dataclass(frozen=True)
class Case:
    """One op at one size. All runs take one of the `buffers`; all ranks have equally many runs and buffers."""

    op: Op
    num_bytes: int  # size of a rank's input
    buffers: list[Any]
    otherwise: Mapping[str, Run]  # alternatives to the op
    by_options: list[tuple[Options, Run]]


def cases_of(op: Op, memory: PeerMemory, device: torch.device, library: Mapping[Op, Collective]) -> Iterator[Case]:
    """Yield the cases of an op, smallest first. Called by all ranks at the same time. `library`: NCCL's functions."""
    if op is Op.DISPATCH:
        return _dispatches(memory, device, library[Op.ALL_GATHER])
    if op is Op.COMBINE:
        return _combines(memory, device, library[Op.REDUCE_SCATTER])
    return _collectives(op, memory, device, library[op])


def _collectives(op: Op, memory: PeerMemory, device: torch.device, library: Collective) -> Iterator[Case]:
    runs: dict[Op, Callable[..., Tensor]] = {
        Op.ALL_REDUCE: gpu.all_reduce,
        Op.ALL_GATHER: gpu.all_gather,
        Op.REDUCE_SCATTER: gpu.reduce_scatter,
    }
    for num_bytes in SIZES:
        buffers = _zeros((num_bytes // 2,), device)
        by_options = _by_options(op, buffers[0], memory, partial(runs[op], memory=memory))
        yield Case(op, num_bytes, buffers, {"library": library}, by_options)


def _dispatches(memory: PeerMemory, device: torch.device, all_gather: Collective) -> Iterator[Case]:
    """Yield cases of dispatch, and of all_gather of the same tokens with packing, unpacking and the expert map."""
    table, places = _experts_on(memory.size, device)

    def gathered(tokens: RoutedTokens, gather: Collective) -> object:
        came, first = tokens.through(gather), memory.rank * len(tokens.hidden)
        own = range(first, first + len(tokens.hidden))
        return map_experts(
            came.expert_ids, table, places=places.of(memory.rank), counted=own
        ), came.weights.contiguous()

    for num_tokens in TOKENS:
        num_bytes = num_tokens * HIDDEN * 2
        buffers = [_random_tokens(num_tokens, memory, device, seed) for seed in range(_most_buffers(num_bytes))]
        hidden = buffers[0].hidden
        packed = hidden.new_empty(num_tokens, HIDDEN + 4 * TOP_K)
        over_peers = _by_options(Op.ALL_GATHER, packed, memory, partial(gpu.all_gather, memory=memory))
        otherwise: dict[str, Run] = {
            "all_gather by the library": partial(gathered, gather=all_gather),
            **{f"by peers {options['BLOCK']}": partial(gathered, gather=run) for options, run in over_peers},
        }
        run = partial(gpu.dispatch, table=table, places=places, memory=memory)
        yield Case(Op.DISPATCH, num_bytes, buffers, otherwise, _by_options(Op.DISPATCH, hidden, memory, run))


def _combines(memory: PeerMemory, device: torch.device, reduce_scatter: Collective) -> Iterator[Case]:
    """Yield cases of combine, and of reduce_scatter of as many rows."""
    table, places = _experts_on(memory.size, device)
    for num_tokens in TOKENS:
        tokens = _random_tokens(num_tokens, memory, device, 0)
        visits = gpu.dispatch(tokens, table, places, memory, {"method": Algorithm.ONE_SHOT, "BLOCK": BLOCKS[0]}).visits
        buffers = _zeros((memory.size * num_tokens, HIDDEN), device)
        given = buffers[0]
        over_peers = _by_options(Op.REDUCE_SCATTER, given, memory, partial(gpu.reduce_scatter, memory=memory))
        otherwise: dict[str, Run] = {
            "reduce_scatter by the library": reduce_scatter,
            **{f"by peers {options['BLOCK']}": run for options, run in over_peers},
        }
        run = partial(gpu.combine, visits=visits, memory=memory)
        yield Case(Op.COMBINE, given.nbytes, buffers, otherwise, _by_options(Op.COMBINE, given, memory, run))


def _by_options(op: Op, x: Tensor, memory: PeerMemory, run: Callable[..., Any]) -> list[tuple[Options, Run]]:
    """Return each set of options that supports x, with a function that runs with it."""
    found: list[tuple[Options, Run]] = []
    for method, block in itertools.product(METHODS[op], BLOCKS):
        options = {"method": int(method), "BLOCK": block}
        if fitting_method(op, options, x, memory) is method:
            found.append((options, partial(run, options=options)))
    return found


def _zeros(shape: tuple[int, ...], device: torch.device) -> list[Tensor]:
    first = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    return [first, *(torch.zeros_like(first) for _ in range(_most_buffers(first.nbytes) - 1))]


def _most_buffers(num_bytes: int) -> int:
    return max(1, min(MOST_BUFFERS, MOST_BUFFERS_BYTES // num_bytes))


def _experts_on(ranks: int, device: torch.device) -> tuple[ExpertMap, RankSlots]:
    """Place experts in order, equally many on each rank but the last."""
    of_each = -(-EXPERTS // ranks)
    table = ExpertMap.empty(EXPERTS, 1, device)
    table.write([[expert] for expert in range(EXPERTS)])
    return table, RankSlots(first=0, apart=of_each, of_each=of_each)


def _random_tokens(num_tokens: int, memory: PeerMemory, device: torch.device, seed: int) -> RoutedTokens:
    generator = torch.Generator(device).manual_seed(1000 * seed + memory.rank)
    scores = torch.rand(num_tokens, EXPERTS, generator=generator, device=device)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator, device=device).bfloat16()
    best = scores.topk(TOP_K, dim=1)
    return RoutedTokens(hidden, best.indices.int(), best.values.contiguous())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m baton.kernels.p2p.measure", description=__doc__.partition("\n")[0])
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
