"""Sends and receives by the Lamport protocol: a value has arrived once its cell is not EMPTY (see `peer_memory`)."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import pdl

from ..options import ELEMENTS_PER_THREAD
from ..peer_memory import CHANNELS, EMPTY

LOOKS = 512  # polls between two checks whether the group has ended: about half a millisecond

EMPTY_VALUE = tl.constexpr(EMPTY)
EMPTY_WORD = tl.constexpr((EMPTY << 16) | (EMPTY & 0xFFFF))  # two values
_CHANNELS = tl.constexpr(CHANNELS)
_LOOKS = tl.constexpr(LOOKS)
VALUES_PER_VECTOR = tl.constexpr(ELEMENTS_PER_THREAD)


@triton.jit
def begin(addresses, turns, rank, dtype: tl.constexpr, RANKS: tl.constexpr, ROOM: tl.constexpr):
    """Begin a program. Return its channel, the turn, the channel's offset in it, ranks, all ranks' memory and its own.

    Ranks are [ranks, 1]; memory is pointers to `dtype`, and a channel has ROOM values. The call waits until all
    previous kernels have ended.
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
    """End a program, after it has received all values of this turn. The next call uses the other turn."""
    tl.debug_barrier()
    tl.store(turns + channel, turn + 1)


@triton.jit
def _memory_of(addresses, ranks, dtype: tl.constexpr, RANKS: tl.constexpr):
    """Return pointers to `dtype` to the memory of each of `ranks`."""
    found = tl.load(addresses + ranks, mask=ranks < RANKS, other=0).to(tl.pointer_type(dtype))
    return tl.multiple_of(found, (16, 16))


@triton.jit
def sent(bits, empty: tl.constexpr):
    """Return `bits` as they are sent: `empty` is replaced, so that it is never sent."""
    return tl.where(bits == empty, 0, bits).to(bits.dtype)


@triton.jit
def receive(slots, mask, empty: tl.constexpr, ended, BLOCK: tl.constexpr):
    """Wait until all values in `slots` have arrived, or the group has ended. Return the values, and empty the slots.

    The decision to poll again is reduced over all of the program's threads, so that its warps do not diverge. BLOCK is
    the width of `slots`, which spans them.
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
