"""Collectives of the ranks of one machine, each of which writes into the memory of the others."""

from __future__ import annotations

from torch import Tensor

from .memory import PeerMemory, PeersOutOfReach
from .options import Op

__all__ = ["Op", "PeerMemory", "PeersOutOfReach", "all_gather", "all_reduce", "reduce_scatter", "serves"]


def serves(op: Op, x: Tensor, memory: PeerMemory) -> bool:
    """Whether `op` takes x, and is the faster way: of equal shapes, the same on every rank.

    It takes whole 16 bytes of bfloat16 or float16, one behind the other, up to what was measured to pay.
    """
    if not x.is_cuda:
        return False
    from . import gpu

    return gpu.serves(op, x, memory)


def all_reduce(x: Tensor, memory: PeerMemory) -> Tensor:
    """The sum of all ranks' x, in place; x. Equal bits on every rank: summed in float32, in one order, rounded once.

    All ranks call it, as everything here, with tensors of one shape, in the same order; it may be captured. Raises
    `ValueError` where it does not `serve` x.
    """
    from . import gpu

    return gpu.all_reduce(x, memory)


def all_gather(x: Tensor, memory: PeerMemory) -> Tensor:
    """All ranks' x [n, ...], one after the other in rank order: [size * n, ...]. Equal bits on every rank.

    Whatever x holds arrives as it is, but for 32 bits (aligned) that are two negative zeros: they come as zeros. So
    numbers of other types may travel in x, unless they are 0x80008000. Raises `ValueError` as `all_reduce` does.
    """
    from . import gpu

    return gpu.all_gather(x, memory)


def reduce_scatter(x: Tensor, memory: PeerMemory) -> Tensor:
    """Of the sum of all ranks' x [size * n, ...], the part of this rank [n, ...].

    Summed as `all_reduce` sums: in float32, in one order, rounded once. Raises `ValueError` as it does.
    """
    from . import gpu

    return gpu.reduce_scatter(x, memory)
