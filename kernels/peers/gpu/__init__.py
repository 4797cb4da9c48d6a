"""Collectives over the memory of peers in Triton: one kernel, which waits for the others' values and for nothing else.

    ONE_SHOT    every rank sends what it has to every rank that wants it: all of it (all_reduce, all_gather), or the
                part of that rank (reduce_scatter); sums are made where they are wanted
    TWO_SHOTS   of all_reduce: every rank sends each part to the rank that sums it, which sends the sums to every rank

Two shots send less where there are more than two ranks, and wait twice.

A program sends all of its values before it waits for any, and waits only for programs of its own number on other
ranks: it needs no other program of its device. Kernels behind may start early, those of this kind included: nothing is
sent, and no count is read, before all that came before has ended.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from baton.kernels import pdl, tuned

from ..memory import PeerMemory
from ..options import ELEMENTS_PER_THREAD, Method, Op, fitting_method, options_for, programs_and_steps, room
from .parts import gather_parts, sum_own_part
from .sums import one_shot, two_shots


def serves(op: Op, x: Tensor, memory: PeerMemory) -> bool:
    """See `baton.kernels.peers.serves`."""
    return fitting_method(op, options_for(op, x, memory), x, memory) is not Method.LIBRARY


def all_reduce(x: Tensor, memory: PeerMemory, options: tuned.Options | None = None) -> Tensor:
    """See `baton.kernels.peers.all_reduce`. `options`: other than the tuned ones."""
    options, method = _way(Op.ALL_REDUCE, x, memory, options)
    kernel = one_shot if method is Method.ONE_SHOT else two_shots
    _launch(kernel, (x,), x.numel(), Op.ALL_REDUCE, x, memory, options)
    return x


def all_gather(x: Tensor, memory: PeerMemory, options: tuned.Options | None = None) -> Tensor:
    """See `baton.kernels.peers.all_gather`. `options`: other than the tuned ones."""
    options, _ = _way(Op.ALL_GATHER, x, memory, options)
    gathered = x.new_empty(memory.size * x.shape[0], *x.shape[1:])
    _launch(gather_parts, (x, gathered), x.numel(), Op.ALL_GATHER, x, memory, options)
    return gathered


def reduce_scatter(x: Tensor, memory: PeerMemory, options: tuned.Options | None = None) -> Tensor:
    """See `baton.kernels.peers.reduce_scatter`. `options`: other than the tuned ones."""
    options, _ = _way(Op.REDUCE_SCATTER, x, memory, options)
    own = x.new_empty(x.shape[0] // memory.size, *x.shape[1:])
    _launch(sum_own_part, (x, own), own.numel(), Op.REDUCE_SCATTER, x, memory, options)
    return own


def _way(op: Op, x: Tensor, memory: PeerMemory, options: tuned.Options | None) -> tuple[tuned.Options, Method]:
    if options is None:
        options = options_for(op, x, memory)
    method = fitting_method(op, options, x, memory)
    if method is Method.LIBRARY:
        raise ValueError(f"{op}: {x.dtype} {list(x.shape)} with strides {x.stride()} is not for the memory of peers")
    return options, method


def _launch(
    kernel: Any, tensors: tuple[Tensor, ...], size: int, op: Op, x: Tensor, memory: PeerMemory, options: tuned.Options
) -> None:
    """`size`: how many values of each rank a rank wants."""
    block = options["BLOCK"]
    programs, steps = programs_and_steps(op, Method(options["method"]), block, x.numel(), memory.size)
    kernel[(programs,)](
        *tensors,
        memory.addresses,
        memory.turns,
        memory.ended,
        size // ELEMENTS_PER_THREAD,
        steps,
        memory.rank,
        RANKS=memory.size,
        ROOM=room(memory),
        BLOCK=block,
        num_warps=block // (32 * ELEMENTS_PER_THREAD),
        **pdl.launch_options(),
    )
