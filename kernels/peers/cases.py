"""What `measure` measures: an op at one size, by each way that there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.kernels.locate import ExpertTable, locate
from baton.kernels.tuned import Options

from . import gpu
from .memory import PeerMemory
from .options import METHODS, Method, Op, fitting_method
from .tokens import PlacesOfRanks, Routed

SIZES = tuple(1 << bits for bits in range(12, 26))  # bytes
BLOCKS = (512, 1024, 2048, 4096)
MOST_BUFFERS, MOST_BUFFERS_BYTES = 40, 128 << 20

# Qwen3-30B-A3B; numbers of tokens of a rank, beyond which there is no room
HIDDEN, EXPERTS, TOP_K = 2048, 128, 8
TOKENS = tuple(1 << bits for bits in range(11))

Run = Callable[[Any], Any]
Collective = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """An op at one size. All runs take one of the `buffers`; all ranks have as many of each."""

    op: Op
    num_bytes: int  # that a rank gives
    buffers: list[Any]
    otherwise: Mapping[str, Run]  # what would serve in its place
    by_options: list[tuple[Options, Run]]


def cases_of(op: Op, memory: PeerMemory, device: torch.device, library: Mapping[Op, Collective]) -> Iterator[Case]:
    """Smallest first. Called by all ranks at the same time. `library`: what it does for ops that it has."""
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
    """Beside all_gather of the same tokens, with what goes with it: they are packed, unpacked and located."""
    table, places = _experts_on(memory.size, device)

    def gathered(tokens: Routed, gather: Collective) -> object:
        came, first = tokens.through(gather), memory.rank * len(tokens.hidden)
        own = range(first, first + len(tokens.hidden))
        return locate(came.expert_ids, table, places=places.of(memory.rank), counted=own), came.weights.contiguous()

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
    """Beside reduce_scatter of as many rows."""
    table, places = _experts_on(memory.size, device)
    for num_tokens in TOKENS:
        tokens = _random_tokens(num_tokens, memory, device, 0)
        visits = gpu.dispatch(tokens, table, places, memory, {"method": Method.ONE_SHOT, "BLOCK": BLOCKS[0]}).visits
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
    """Each set of options that takes x, and what runs with it."""
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


def _experts_on(ranks: int, device: torch.device) -> tuple[ExpertTable, PlacesOfRanks]:
    """In order, equally many on each rank but the last."""
    of_each = -(-EXPERTS // ranks)
    table = ExpertTable.empty(EXPERTS, 1, device)
    table.write([[expert] for expert in range(EXPERTS)])
    return table, PlacesOfRanks(first=0, apart=of_each, of_each=of_each)


def _random_tokens(num_tokens: int, memory: PeerMemory, device: torch.device, seed: int) -> Routed:
    generator = torch.Generator(device).manual_seed(1000 * seed + memory.rank)
    scores = torch.rand(num_tokens, EXPERTS, generator=generator, device=device)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator, device=device).bfloat16()
    best = scores.topk(TOP_K, dim=1)
    return Routed(hidden, best.indices.int(), best.values.contiguous())
