"""Which way an op goes on a device, and how its values are dealt out to programs."""

from __future__ import annotations

from enum import IntEnum, StrEnum

import torch
from torch import Tensor

from baton.kernels import tuned
from baton.kernels.sizes import cdiv, next_power_of_2

from .memory import CHANNELS, PeerMemory

ELEMENTS_PER_THREAD = 8  # 16 bytes
MOST_PROGRAMS = CHANNELS


class Op(StrEnum):
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"


class Method(IntEnum):
    LIBRARY = 0
    ONE_SHOT = 1
    TWO_SHOTS = 2


METHODS = {
    Op.ALL_REDUCE: (Method.ONE_SHOT, Method.TWO_SHOTS),
    Op.ALL_GATHER: (Method.ONE_SHOT,),
    Op.REDUCE_SCATTER: (Method.ONE_SHOT,),
}


def options_for(op: Op, x: Tensor, memory: PeerMemory) -> tuned.Options:
    """One set for all sizes up to the same power of two, so that few kernels serve all."""
    num_bytes = next_power_of_2(x.numel() * x.itemsize)
    key = tuning_key(op, memory.size, num_bytes)
    return tuned.config("peers", x.device, key, untuned(op, memory.size, num_bytes))


def tuning_key(op: Op, ranks: int, num_bytes: int) -> tuned.Key:
    """`num_bytes`: of what a rank gives."""
    return {"op": op.value, "ranks": str(ranks), "bytes": num_bytes}


def untuned(op: Op, ranks: int, num_bytes: int) -> tuned.Options:
    """Sums as links of some 300 GB/s and two microseconds from device to device would have them.

    The others are the library's until they have been measured.
    """
    if op is not Op.ALL_REDUCE or num_bytes > 4 << 20:
        method = Method.LIBRARY
    else:
        method = Method.ONE_SHOT if ranks == 2 or num_bytes * ranks <= 2 << 20 else Method.TWO_SHOTS
    return {"method": method, "BLOCK": 1024}


def fitting_method(op: Op, options: tuned.Options, x: Tensor, memory: PeerMemory) -> Method:
    """The method of the options where it takes x and there is room for its values, else the library's."""
    method, block = Method(options["method"]), options["BLOCK"]
    if method is Method.LIBRARY or not _is_plain(op, x, memory.size):
        return Method.LIBRARY
    _, steps = programs_and_steps(op, method, block, x.numel(), memory.size)
    needed = steps * block * memory.size * (2 if method is Method.TWO_SHOTS else 1)
    return method if needed <= room(memory) else Method.LIBRARY


def programs_and_steps(op: Op, method: Method, block: int, size: int, ranks: int) -> tuple[int, int]:
    """Of `size` values a program takes a block in a step; where each rank gets its own part, a block of each rank."""
    is_parted = op is Op.REDUCE_SCATTER or method is Method.TWO_SHOTS
    blocks = cdiv(size, block * ranks if is_parted else block)
    programs = min(blocks, MOST_PROGRAMS)
    return programs, cdiv(blocks, programs)


def room(memory: PeerMemory) -> int:
    """Values of a channel in one turn."""
    return memory.room_bytes // (2 * CHANNELS)


def _is_plain(op: Op, x: Tensor, ranks: int) -> bool:
    """Whole vectors of values of 16 bits, one behind the other, in each rank's part."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.is_contiguous()
        and x.numel() > 0
        and x.numel() % (ELEMENTS_PER_THREAD * ranks if op is Op.REDUCE_SCATTER else ELEMENTS_PER_THREAD) == 0
        and (op is not Op.REDUCE_SCATTER or x.shape[0] % ranks == 0)
        and x.data_ptr() % (2 * ELEMENTS_PER_THREAD) == 0
    )
