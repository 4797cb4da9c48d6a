"""Sums over the memory of peers in Triton: one kernel, which waits for the others' values and for nothing else.

    ONE_SHOT    every rank sends all of its values to every rank, and sums what it gets
    TWO_SHOTS   every rank sends each part of its values to the rank that sums it, which sends the sums to every rank

Two shots send less where there are more than two ranks, and wait twice.

A program sends all of its values before it waits for any, and waits only for programs of its own number on other
ranks: it needs no other program of its device. Kernels behind may start early, those of this kind included: nothing is
sent, and no count is read, before all that came before has ended.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import pdl, tuned
from baton.kernels.sizes import cdiv, next_power_of_2

from .memory import CHANNELS, EMPTY, PeerMemory

ELEMENTS_PER_THREAD = 8  # 16 bytes
LOOKS = 512  # from one look at whether the group has ended to the next: about half a millisecond

_EMPTY = tl.constexpr(EMPTY)
_CHANNELS = tl.constexpr(CHANNELS)
_ELEMENTS_PER_THREAD = tl.constexpr(ELEMENTS_PER_THREAD)
_LOOKS = tl.constexpr(LOOKS)


class Method(IntEnum):
    LIBRARY = 0
    ONE_SHOT = 1
    TWO_SHOTS = 2


def serves(x: Tensor, memory: PeerMemory) -> bool:
    """See `baton.kernels.all_reduce.serves`."""
    return _is_plain(x) and fitting_method(options_for(x, memory), x, memory) is not Method.LIBRARY


def all_reduce(x: Tensor, memory: PeerMemory, options: tuned.Options | None = None) -> Tensor:
    """See `baton.kernels.all_reduce.all_reduce`. `options`: other than the tuned ones."""
    if options is None:
        options = options_for(x, memory)
    method = fitting_method(options, x, memory)
    if not _is_plain(x) or method is Method.LIBRARY:
        raise ValueError(f"{x.dtype} {list(x.shape)} with strides {x.stride()} is not for the memory of peers")
    kernel = _one_shot if method is Method.ONE_SHOT else _two_shots
    programs, steps = _programs_and_steps(method, options["BLOCK"], x.numel(), memory.size)
    kernel[(programs,)](
        x,
        memory.addresses,
        memory.turns,
        memory.ended,
        x.numel() // ELEMENTS_PER_THREAD,
        steps,
        memory.rank,
        RANKS=memory.size,
        ROOM=_room(memory),
        BLOCK=options["BLOCK"],
        num_warps=options["BLOCK"] // (32 * ELEMENTS_PER_THREAD),
        **pdl.launch_options(),
    )
    return x


def options_for(x: Tensor, memory: PeerMemory) -> tuned.Options:
    """One set for all sizes up to the same power of two, so that few kernels serve all."""
    num_bytes = next_power_of_2(x.numel() * x.itemsize)
    key = tuning_key(memory.size, num_bytes)
    return tuned.config("all_reduce", x.device, key, untuned(memory.size, num_bytes))


def tuning_key(ranks: int, num_bytes: int) -> tuned.Key:
    return {"ranks": str(ranks), "bytes": num_bytes}


def untuned(ranks: int, num_bytes: int) -> tuned.Options:
    """As links of some 300 GB/s and two microseconds from device to device would have it."""
    if num_bytes > 4 << 20:
        method = Method.LIBRARY
    else:
        method = Method.ONE_SHOT if ranks == 2 or num_bytes * ranks <= 2 << 20 else Method.TWO_SHOTS
    return {"method": method, "BLOCK": 1024}


def fitting_method(options: tuned.Options, x: Tensor, memory: PeerMemory) -> Method:
    """The method of the options where there is room for its values, else the library's."""
    method, block = Method(options["method"]), options["BLOCK"]
    if method is Method.LIBRARY or not x.numel():
        return Method.LIBRARY
    _, steps = _programs_and_steps(method, block, x.numel(), memory.size)
    needed = steps * block * memory.size * (2 if method is Method.TWO_SHOTS else 1)
    return method if needed <= _room(memory) else Method.LIBRARY


def _is_plain(x: Tensor) -> bool:
    """Whole vectors of values of 16 bits, one behind the other."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.is_contiguous()
        and x.numel() % ELEMENTS_PER_THREAD == 0
        and x.data_ptr() % (2 * ELEMENTS_PER_THREAD) == 0
    )


def _programs_and_steps(method: Method, block: int, size: int, ranks: int) -> tuple[int, int]:
    """A program takes a block in a step; of two shots, a block of each rank."""
    blocks = cdiv(size, block if method is Method.ONE_SHOT else block * ranks)
    programs = min(blocks, CHANNELS)
    return programs, cdiv(blocks, programs)


def _room(memory: PeerMemory) -> int:
    """Values of a channel in one turn."""
    return memory.room_bytes // (2 * CHANNELS)


@triton.jit(do_not_specialize=["num_vectors", "steps", "rank"])
def _one_shot(
    x,  # [8 * num_vectors] of 16 bits, summed in place
    addresses,  # [RANKS] int64
    turns,  # [CHANNELS] int32
    ended,  # [1] int32
    num_vectors,
    steps,  # blocks of a program
    rank,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pdl.let_next_start()
    channel = tl.program_id(0)
    size = num_vectors * _ELEMENTS_PER_THREAD
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))[:, None]
    lanes = tl.arange(0, BLOCK)[None, :]
    receivers = tl.load(addresses + ranks, mask=ranks < RANKS, other=0).to(tl.pointer_type(tl.int16))
    receivers = tl.multiple_of(receivers, (16, 16))
    own = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int16)), 16)
    pdl.wait_for_previous()
    turn = tl.load(turns + channel)
    start = ((turn & 1) * _CHANNELS + channel) * ROOM
    for step in range(steps):
        at = (step * tl.num_programs(0) + channel) * BLOCK + lanes
        bits = _bits(tl.load(x + at, mask=at < size, other=0.0))
        slot = start + (step * RANKS + rank) * BLOCK + lanes
        tl.store(receivers + slot, bits, mask=(ranks < RANKS) & (at < size))
    for step in range(steps):
        at = (step * tl.num_programs(0) + channel) * BLOCK + lanes
        slots = start + (step * RANKS + ranks) * BLOCK + lanes
        total = _sum(_receive(own + slots, (ranks < RANKS) & (at < size), ended, BLOCK), x.dtype.element_ty)
        tl.store(x + at, total, mask=at < size)
    tl.debug_barrier()
    tl.store(turns + channel, turn + 1)


@triton.jit(do_not_specialize=["num_vectors", "steps", "rank"])
def _two_shots(
    x,  # [8 * num_vectors] of 16 bits, summed in place
    addresses,  # [RANKS] int64
    turns,  # [CHANNELS] int32
    ended,  # [1] int32
    num_vectors,
    steps,  # blocks of a program, for each rank
    rank,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pdl.let_next_start()
    channel = tl.program_id(0)
    size = num_vectors * _ELEMENTS_PER_THREAD
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))[:, None]
    lanes = tl.arange(0, BLOCK)[None, :]
    receivers = tl.load(addresses + ranks, mask=ranks < RANKS, other=0).to(tl.pointer_type(tl.int16))
    receivers = tl.multiple_of(receivers, (16, 16))
    own = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int16)), 16)
    pdl.wait_for_previous()
    turn = tl.load(turns + channel)
    parts = ((turn & 1) * _CHANNELS + channel) * ROOM
    sums = parts + steps * RANKS * BLOCK
    for step in range(steps):
        block = (step * tl.num_programs(0) + channel) * RANKS
        at = (block + ranks) * BLOCK + lanes
        mask = (ranks < RANKS) & (at < size)
        bits = _bits(tl.load(x + at, mask=mask, other=0.0))
        tl.store(receivers + parts + (step * RANKS + rank) * BLOCK + lanes, bits, mask=mask)
    for step in range(steps):
        block = (step * tl.num_programs(0) + channel) * RANKS
        mask = (ranks < RANKS) & ((block + rank) * BLOCK + lanes < size)
        slots = parts + (step * RANKS + ranks) * BLOCK + lanes
        total = _sum(_receive(own + slots, mask, ended, BLOCK), x.dtype.element_ty)
        tl.store(receivers + sums + (step * RANKS + rank) * BLOCK + lanes, _bits(total), mask=mask)
    for step in range(steps):
        block = (step * tl.num_programs(0) + channel) * RANKS
        at = (block + ranks) * BLOCK + lanes
        mask = (ranks < RANKS) & (at < size)
        slots = sums + (step * RANKS + ranks) * BLOCK + lanes
        bits = _receive(own + slots, mask, ended, BLOCK)
        tl.store(x + at, bits.to(x.dtype.element_ty, bitcast=True), mask=mask)
    tl.debug_barrier()
    tl.store(turns + channel, turn + 1)


@triton.jit
def _bits(values):
    """As they are sent: none is EMPTY."""
    bits = values.to(tl.int16, bitcast=True)
    return tl.where(bits == _EMPTY, 0, bits).to(tl.int16)


@triton.jit
def _sum(bits, dtype: tl.constexpr):
    """Of the ranks' values [ranks, BLOCK], by the same instructions on every rank: [1, BLOCK]."""
    return tl.sum(bits.to(dtype, bitcast=True).to(tl.float32), axis=0, keep_dims=True).to(dtype)


@triton.jit
def _receive(slots, mask, ended, BLOCK: tl.constexpr):
    """What has come to `slots`, once all of it has, or what is there when the group has ended. Leaves them empty.

    Whether to look again is reduced over the program's threads, so that all of its warps go the same way.
    """
    bits = tl.load(slots, mask=mask, other=0, volatile=True)
    missing = _any(bits == _EMPTY)
    looks = 0
    while missing != 0:
        bits = tl.load(slots, mask=mask, other=0, volatile=True)
        missing = _any(bits == _EMPTY)
        looks += 1
        if looks % _LOOKS == 64:
            over = _any(tl.load(ended + tl.zeros([1, BLOCK], tl.int32), volatile=True) != 0)
            missing = missing & (1 - over)
    tl.store(slots, tl.full(slots.shape, _EMPTY, tl.int16), mask=mask)
    return bits


@triton.jit
def _any(conditions):
    return tl.max(tl.max(conditions.to(tl.int32), axis=0), axis=0)
