"""Collectives of the ranks of one machine, each of which writes into the memory of the others."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.locate import ExpertTable

from .memory import PeerMemory, PeersOutOfReach
from .options import Op
from .tokens import Brought, PlacesOfRanks, Routed

__all__ = [
    "Brought",
    "Op",
    "PeerMemory",
    "PeersOutOfReach",
    "PlacesOfRanks",
    "Routed",
    "all_gather",
    "all_reduce",
    "combine",
    "dispatch",
    "reduce_scatter",
    "rehearse",
    "serves",
    "serves_tokens",
]


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


def serves_tokens(tokens: Routed, memory: PeerMemory) -> bool:
    """Whether `dispatch` takes the tokens, and is the faster way. `serves` answers for `combine`."""
    if not tokens.hidden.is_cuda:
        return False
    from . import gpu

    return gpu.serves_tokens(tokens, memory)


def dispatch(tokens: Routed, table: ExpertTable, places: PlacesOfRanks, memory: PeerMemory) -> Brought:
    """Brings each token to the ranks that have at least one of its experts, and everybody's routing to everybody.

    What comes is what `all_gather` of the tokens and `locate` of their experts give; this rank's own are added to
    `table.loads`. All ranks give as many tokens. Raises `ValueError` as `all_reduce` does.
    """
    from . import gpu

    return gpu.dispatch(tokens, table, places, memory)


def combine(partial: Tensor, visits: Tensor, memory: PeerMemory) -> Tensor:
    """What `reduce_scatter` gives of partial [size * T, hidden_size], to the bit, where rows that did not come are 0.

    Only the rows that `dispatch` brought are sent back, and read: `visits` is what it said of them. Raises `ValueError`
    as `all_reduce` does.
    """
    from . import gpu

    return gpu.combine(partial, visits, memory)


def rehearse(memory: PeerMemory, dtype: torch.dtype) -> None:
    """Launches every kernel that collectives of that type take, of whatever size: nothing is left to compile later.

    All ranks call it. Not those of tokens, which belong to captured steps: their sizes are known.
    """
    from . import gpu

    gpu.rehearse(memory, dtype)
