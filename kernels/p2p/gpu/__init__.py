"""Peer-to-peer collectives in Triton. Each is one kernel, which waits only for other ranks' values.

    ONE_SHOT    every rank sends its values to every rank that needs them: all values (all_reduce, all_gather), or that
                rank's part (reduce_scatter); the receivers sum
    TWO_SHOTS   all_reduce only: every rank sends each part to the rank that sums it, which sends the sums to all

Two shots send less with more than two ranks, but wait twice. Tokens are sent in one shot (`dispatch_combine`).

A program sends all of its values before it waits for any, and waits only for the programs with its own index on other
ranks; it does not depend on other programs of its device. Later kernels may start early, including collectives: none
sends anything, or reads a counter, before all previous kernels have ended.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baton.kernels import pdl, tuned
from baton.kernels.expert_map import ExpertMap

from ..options import (
    ELEMENTS_PER_THREAD,
    MOST_CHOICES,
    OF_TOKENS,
    Algorithm,
    Op,
    fitting_method,
    options_for,
    options_of_any_size,
    programs_and_steps,
    room,
)
from ..peer_memory import PeerMemory
from ..token_exchange import DispatchedTokens, RankSlots, RoutedTokens
from .collectives import gather_parts, one_shot, sum_own_part, two_shots
from .dispatch_combine import bring_tokens, sum_tokens


def supports(op: Op, x: Tensor, memory: PeerMemory) -> bool:
    """See `baton.kernels.p2p.supports`."""
    return fitting_method(op, options_for(op, x, memory), x, memory) is not Algorithm.LIBRARY


def supports_dispatch(tokens: RoutedTokens, memory: PeerMemory) -> bool:
    """See `baton.kernels.p2p.supports_dispatch`."""
    return tokens.expert_ids.shape[1] <= MOST_CHOICES and supports(Op.DISPATCH, tokens.hidden, memory)


def all_reduce(x: Tensor, memory: PeerMemory, options: tuned.Options | None = None) -> Tensor:
    """See `baton.kernels.p2p.all_reduce`. `options`: other than the tuned ones."""
    options, method = _algorithm_for(Op.ALL_REDUCE, x, memory, options)
    kernel = one_shot if method is Algorithm.ONE_SHOT else two_shots
    _launch(kernel, (x,), _vectors(x), Op.ALL_REDUCE, x, memory, options)
    return x


def all_gather(x: Tensor, memory: PeerMemory, options: tuned.Options | None = None) -> Tensor:
    """See `baton.kernels.p2p.all_gather`. `options`: other than the tuned ones."""
    options, _ = _algorithm_for(Op.ALL_GATHER, x, memory, options)
    gathered = x.new_empty(memory.size * x.shape[0], *x.shape[1:])
    _launch(gather_parts, (x, gathered), _vectors(x), Op.ALL_GATHER, x, memory, options)
    return gathered


def reduce_scatter(x: Tensor, memory: PeerMemory, options: tuned.Options | None = None) -> Tensor:
    """See `baton.kernels.p2p.reduce_scatter`. `options`: other than the tuned ones."""
    options, _ = _algorithm_for(Op.REDUCE_SCATTER, x, memory, options)
    own = x.new_empty(x.shape[0] // memory.size, *x.shape[1:])
    _launch(sum_own_part, (x, own), _vectors(own), Op.REDUCE_SCATTER, x, memory, options)
    return own


def dispatch(
    tokens: RoutedTokens,
    table: ExpertMap,
    places: RankSlots,
    memory: PeerMemory,
    options: tuned.Options | None = None,
) -> DispatchedTokens:
    """See `baton.kernels.p2p.dispatch`. `options`: other than the tuned ones."""
    hidden, ids, weights = tokens.hidden, tokens.expert_ids.contiguous(), tokens.weights.contiguous()
    options, _ = _algorithm_for(Op.DISPATCH, hidden, memory, options)
    if ids.shape[1] > MOST_CHOICES:
        raise ValueError(f"dispatch: {ids.shape[1]} experts of a token: it takes up to {MOST_CHOICES}")
    brought = DispatchedTokens.empty(tokens, memory.size)
    _launch(
        bring_tokens,
        (
            *(hidden, ids, weights),
            *(table.places, table.counts, table.loads),
            *(brought.hidden, brought.expert_ids, brought.weights, brought.visits),
        ),
        len(hidden),
        Op.DISPATCH,
        hidden,
        memory,
        options,
        (len(table.counts), places.first, places.apart, places.of_each),
        HIDDEN=hidden.shape[1],
        TOP_K=ids.shape[1],
        REPLICAS=table.places.shape[1],
    )
    return brought


def combine(partial: Tensor, visits: Tensor, memory: PeerMemory, options: tuned.Options | None = None) -> Tensor:
    """See `baton.kernels.p2p.combine`. `options`: other than the tuned ones."""
    options, _ = _algorithm_for(Op.COMBINE, partial, memory, options)
    total = partial.new_empty(visits.shape[2], partial.shape[1])
    _launch(
        sum_tokens,
        (partial, total, visits),
        len(total),
        Op.COMBINE,
        partial,
        memory,
        options,
        HIDDEN=partial.shape[1],
    )
    return total


def warm_up(memory: PeerMemory, dtype: torch.dtype) -> None:
    """See `baton.kernels.p2p.warm_up`."""
    smallest = torch.zeros(memory.size * ELEMENTS_PER_THREAD, dtype=dtype, device=memory.addresses.device)
    for op, run in ((Op.ALL_REDUCE, all_reduce), (Op.ALL_GATHER, all_gather), (Op.REDUCE_SCATTER, reduce_scatter)):
        for options in options_of_any_size(op, memory):
            if fitting_method(op, options, smallest, memory) is not Algorithm.LIBRARY:  # supported dtype, enough room
                run(smallest, memory, options)


def _algorithm_for(
    op: Op, x: Tensor, memory: PeerMemory, options: tuned.Options | None
) -> tuple[tuned.Options, Algorithm]:
    if options is None:
        options = options_for(op, x, memory)
    method = fitting_method(op, options, x, memory)
    if method is Algorithm.LIBRARY:
        raise ValueError(f"{op}: {x.dtype} {list(x.shape)} with strides {x.stride()} is not for the memory of peers")
    return options, method


def _vectors(x: Tensor) -> int:
    return x.numel() // ELEMENTS_PER_THREAD


def _launch(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    size: int,
    op: Op,
    x: Tensor,
    memory: PeerMemory,
    options: tuned.Options,
    numbers: tuple[int, ...] = (),
    **constants: int,
) -> None:
    """Launch a kernel. `size` is the number of vectors, or tokens, that a rank receives from each rank.

    `numbers` and `constants` are further arguments.
    """
    block = options["BLOCK"]
    programs, steps = programs_and_steps(op, Algorithm(options["method"]), block, x.shape, memory.size)
    kernel[(programs,)](
        *tensors,
        memory.addresses,
        memory.turns,
        memory.ended,
        *((size,) if op in OF_TOKENS else (size, steps)),
        memory.rank,
        *numbers,
        RANKS=memory.size,
        ROOM=room(memory),
        BLOCK=block,
        **constants,
        num_warps=block // (32 * ELEMENTS_PER_THREAD),
        **pdl.launch_options(),
    )
