"""Peer-to-peer collectives of the ranks of one machine, by kernels that write into each other's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.expert_map import ExpertMap

from .options import Op
from .peer_memory import PeerAccessError, PeerMemory
from .token_exchange import DispatchedTokens, RankSlots, RoutedTokens

__all__ = [
    "DispatchedTokens",
    "Op",
    "PeerAccessError",
    "PeerMemory",
    "RankSlots",
    "RoutedTokens",
    "all_gather",
    "all_reduce",
    "combine",
    "dispatch",
    "reduce_scatter",
    "supports",
    "supports_dispatch",
    "warm_up",
]


def supports(op: Op, x: Tensor, memory: PeerMemory) -> bool:
    """Return true where `op` takes x and is the faster way. The answer is the same on every rank for equal shapes.

    It takes whole 16 bytes of bfloat16 or float16, one behind the other, up to what was measured to pay.
    """
    if not x.is_cuda:
        return False
    from . import gpu

    return gpu.supports(op, x, memory)


def all_reduce(x: Tensor, memory: PeerMemory) -> Tensor:
    """Sum all ranks' x in place and return x. Equal bits on every rank: summed in float32, in one order, rounded once.

    All ranks call it, as everything here, with tensors of one shape, in the same order; it may be captured. Raises
    `ValueError` where it does not `supports` x.
    """
    from . import gpu

    return gpu.all_reduce(x, memory)


def all_gather(x: Tensor, memory: PeerMemory) -> Tensor:
    """Concatenate all ranks' x [n, ...] in rank order: [size * n, ...]. Equal bits on every rank.

    Whatever x holds arrives as it is, but for 32 bits (aligned) that are two negative zeros: they come as zeros. So
    numbers of other types may travel in x, unless they are 0x80008000. Raises `ValueError` as `all_reduce` does.
    """
    from . import gpu

    return gpu.all_gather(x, memory)


def reduce_scatter(x: Tensor, memory: PeerMemory) -> Tensor:
    """Sum all ranks' x [size * n, ...] and return this rank's part [n, ...].

    Summed as `all_reduce` sums: in float32, in one order, rounded once. Raises `ValueError` as it does.
    """
    from . import gpu

    return gpu.reduce_scatter(x, memory)


def supports_dispatch(tokens: RoutedTokens, memory: PeerMemory) -> bool:
    """Return true where `dispatch` takes the tokens and is the faster way. `supports` answers for `combine`."""
    if not tokens.hidden.is_cuda:
        return False
    from . import gpu

    return gpu.supports_dispatch(tokens, memory)


def dispatch(tokens: RoutedTokens, table: ExpertMap, places: RankSlots, memory: PeerMemory) -> DispatchedTokens:
    """Send each token to the ranks that have at least one of its experts, and every token's routing to all ranks.

    What comes is what `all_gather` of the tokens and `map_experts` of their experts give; this rank's own are added to
    `table.loads`. All ranks give as many tokens. Raises `ValueError` as `all_reduce` does.
    """
    from . import gpu

    return gpu.dispatch(tokens, table, places, memory)


def combine(partial: Tensor, visits: Tensor, memory: PeerMemory) -> Tensor:
    """Return `reduce_scatter` of partial [size * T, hidden_size], to the bit, with rows that were not dispatched as 0.

    Only the rows that `dispatch` brought are sent back, and read: `visits` is its record of them. Raises `ValueError`
    as `all_reduce` does.
    """
    from . import gpu

    return gpu.combine(partial, visits, memory)


def warm_up(memory: PeerMemory, dtype: torch.dtype) -> None:
    """Launch every kernel that collectives of a type use, of whatever size: nothing is left to compile later.

    All ranks call it. Not those of tokens, which belong to captured steps: their sizes are known.
    """
    from . import gpu

    gpu.warm_up(memory, dtype)
