"""Sends and receives by the Lamport protocol: a slot is full once it no longer holds the value EMPTY (see
`peer_memory`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import pdl

from ..options import ELEMENTS_PER_THREAD
from ..peer_memory import CHANNELS, EMPTY

LOOKS = 512  # from one look at whether the group has ended to the next: about half a millisecond

EMPTY_VALUE = tl.constexpr(EMPTY)
EMPTY_WORD = tl.constexpr((EMPTY << 16) | (EMPTY & 0xFFFF))  # two values
_CHANNELS = tl.constexpr(CHANNELS)
_LOOKS = tl.constexpr(LOOKS)
VALUES_PER_VECTOR = tl.constexpr(ELEMENTS_PER_THREAD)


@triton.jit
def begin(addresses, turns, rank, dtype: tl.constexpr, RANKS: tl.constexpr, ROOM: tl.constexpr):
    """Begin a program: return its channel, the turn, the channel's offset in it, ranks, the memory of all and of this
    rank.

    Ranks are [ranks, 1], memory is pointers to `dtype`, of which a channel has ROOM. What comes behind this call comes
    behind all kernels before.
    """
    pdl.let_next_start()
    channel = tl.program_id(0)
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))[:, None]
    receivers = _memory_of(addresses, ranks, dtype, RANKS)
    own = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(dtype)), 16)
    pdl.wait_for_previous()
    turn = tl.load(turns + channel)
    return channel, turn, ((turn & 1) * _CHANNELS + channel) * ROOM, ranks, receivers, own


@triton.jit
def end(turns, channel, turn):
    """End a program: the next call uses the other turn, once all of this one has been received."""
    tl.debug_barrier()
    tl.store(turns + channel, turn + 1)


@triton.jit
def _memory_of(addresses, ranks, dtype: tl.constexpr, RANKS: tl.constexpr):
    """Return pointers to `dtype` to the memory of each of `ranks`."""
    found = tl.load(addresses + ranks, mask=ranks < RANKS, other=0).to(tl.pointer_type(dtype))
    return tl.multiple_of(found, (16, 16))


@triton.jit
def sent(bits, empty: tl.constexpr):
    """Return `bits` as they are sent: none is `empty`."""
    return tl.where(bits == empty, 0, bits).to(bits.dtype)


@triton.jit
def receive(slots, mask, empty: tl.constexpr, ended, BLOCK: tl.constexpr):
    """Wait until all of `slots` has come, or the group has ended; return the values and leave the slots empty.

    Whether to look again is reduced over the program's threads, so that all of its warps go the same way: BLOCK is the
    width of `slots`, which spans them.
    """
    bits = tl.load(slots, mask=mask, other=0, volatile=True)
    missing = _any(bits == empty)
    looks = 0
    while missing != 0:
        bits = tl.load(slots, mask=mask, other=0, volatile=True)
        missing = _any(bits == empty)
        looks += 1
        if looks % _LOOKS == 64:
            over = _any(tl.load(ended + tl.zeros([1, BLOCK], tl.int32), volatile=True) != 0)
            missing = missing & (1 - over)
    tl.store(slots, tl.full(slots.shape, empty, bits.dtype), mask=mask)
    return bits


@triton.jit
def sum_of(bits, dtype: tl.constexpr):
    """Sum the ranks' values [ranks, BLOCK] by the same instructions on every rank: [1, BLOCK]."""
    return tl.sum(bits.to(dtype, bitcast=True).to(tl.float32), axis=0, keep_dims=True).to(dtype)


@triton.jit
def _any(conditions):
    return tl.max(tl.max(conditions.to(tl.int32), axis=0), axis=0)
