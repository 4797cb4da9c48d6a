"""Launch options of the collectives: the method for a size, and the division of values over programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum, StrEnum

import torch
from torch import Tensor

from baton.kernels import tuned
from baton.kernels.launch import cdiv, next_power_of_2

from .peer_memory import CHANNELS, PeerMemory

ELEMENTS_PER_THREAD = 8  # 16 bytes
MOST_PROGRAMS = CHANNELS
ROUTING_VALUES = 64  # room for a token's routing, in values of 16 bits, ahead of each block of its row
MOST_CHOICES = ROUTING_VALUES // 4  # experts of a token that it has room for: a number and a weight of 32 bits each


class Op(StrEnum):
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    DISPATCH = "dispatch"
    COMBINE = "combine"


class Algorithm(IntEnum):
    LIBRARY = 0
    ONE_SHOT = 1
    TWO_SHOTS = 2


METHODS = {
    Op.ALL_REDUCE: (Algorithm.ONE_SHOT, Algorithm.TWO_SHOTS),
    Op.ALL_GATHER: (Algorithm.ONE_SHOT,),
    Op.REDUCE_SCATTER: (Algorithm.ONE_SHOT,),
    Op.DISPATCH: (Algorithm.ONE_SHOT,),
    Op.COMBINE: (Algorithm.ONE_SHOT,),
}
IN_PARTS = (Op.REDUCE_SCATTER, Op.COMBINE)  # ops whose input has a part for each rank
OF_TOKENS = (Op.DISPATCH, Op.COMBINE)  # ops on rows [T, hidden_size], of which a program takes a block at a time


def options_for(op: Op, x: Tensor, memory: PeerMemory) -> tuned.Options:
    """Return the options. Sizes with the same next power of two share them, so that few kernels are compiled."""
    num_bytes = next_power_of_2(x.numel() * x.itemsize)
    key = tuning_key(op, memory.size, num_bytes)
    return tuned.config("p2p", x.device, key, untuned(op, memory.size, num_bytes))


def options_of_any_size(op: Op, memory: PeerMemory) -> list[tuned.Options]:
    """Return all distinct options that `options_for` may return for any size, without those of the library."""
    words = {"op": op.value, "ranks": str(memory.size)}
    measured = [
        entry.config for entry in tuned.known("p2p", memory.addresses.device) if words.items() <= entry.key.items()
    ]
    found = measured or [untuned(op, memory.size, 1 << bits) for bits in range(40)]
    return [
        each for index, each in enumerate(found) if each["method"] != Algorithm.LIBRARY and each not in found[:index]
    ]


def tuning_key(op: Op, ranks: int, num_bytes: int) -> tuned.Key:
    """Return the tuning key; `num_bytes` is the size of a rank's input."""
    return {"op": op.value, "ranks": str(ranks), "bytes": num_bytes}


def untuned(op: Op, ranks: int, num_bytes: int) -> tuned.Options:
    """Return options for a device without measurements, assuming links of 300 GB/s and a latency of 2 us.

    Ops other than all_reduce use the library until they have been measured.
    """
    if op is not Op.ALL_REDUCE or num_bytes > 4 << 20:
        method = Algorithm.LIBRARY
    else:
        method = Algorithm.ONE_SHOT if ranks == 2 or num_bytes * ranks <= 2 << 20 else Algorithm.TWO_SHOTS
    return {"method": method, "BLOCK": 1024}


def fitting_method(op: Op, options: tuned.Options, x: Tensor, memory: PeerMemory) -> Algorithm:
    """Return the options' method if it supports x and the memory has room for its values, else LIBRARY."""
    method, block = Algorithm(options["method"]), options["BLOCK"]
    if method is Algorithm.LIBRARY or not _is_plain(op, x, memory.size):
        return Algorithm.LIBRARY
    _, steps = programs_and_steps(op, method, block, x.shape, memory.size)
    of_rank = block + (ROUTING_VALUES if op is Op.DISPATCH else 0)
    needed = steps * of_rank * memory.size * (2 if method is Algorithm.TWO_SHOTS else 1)
    return method if needed <= room(memory) else Algorithm.LIBRARY


def programs_and_steps(op: Op, method: Algorithm, block: int, shape: Sequence[int], ranks: int) -> tuple[int, int]:
    """Return the number of programs, and of iterations of each.

    An iteration handles a block of values, or one of each rank's part if the op has parts; for tokens, a block of a
    row.
    """
    parts = ranks if op in IN_PARTS or method is Algorithm.TWO_SHOTS else 1
    if op in OF_TOKENS:
        blocks = shape[0] // parts * cdiv(shape[1], block)
    else:
        blocks = cdiv(math.prod(shape), block * parts)
    programs = min(blocks, MOST_PROGRAMS)
    return programs, cdiv(blocks, programs)


def room(memory: PeerMemory) -> int:
    """Return the number of values that fit in a channel in one turn."""
    return memory.room_bytes // (2 * CHANNELS)


def _is_plain(op: Op, x: Tensor, ranks: int) -> bool:
    """Return whether each rank's part (for tokens, each row) is whole vectors of contiguous 16-bit values."""
    parts = ranks if op in IN_PARTS else 1
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.is_contiguous()
        and x.numel() > 0
        and x.numel() % (ELEMENTS_PER_THREAD * parts) == 0
        and x.shape[0] % parts == 0
        and (op not in OF_TOKENS or (x.dim() == 2 and x.shape[1] % ELEMENTS_PER_THREAD == 0))
        and x.data_ptr() % (2 * ELEMENTS_PER_THREAD) == 0
    )
