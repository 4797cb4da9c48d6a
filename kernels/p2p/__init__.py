"""Peer-to-peer collectives of the ranks of one machine, by kernels that write to each other's memory."""

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
    """Return whether `op` supports x, and is faster than a library. All ranks get the same answer for equal shapes.

    x must be contiguous bfloat16 or float16, a multiple of 16 bytes, up to the size at which measurements favour `op`.
    """
    if not x.is_cuda:
        return False
    from . import gpu

    return gpu.supports(op, x, memory)


def all_reduce(x: Tensor, memory: PeerMemory) -> Tensor:
    """Sum all ranks' x in place, and return x. Results are bitwise equal on all ranks: float32 sums, rounded once.

    All ranks must call it (and every other function here) with tensors of the same shape, in the same order. It may be
    captured in a CUDA graph. Raises `ValueError` if x is not supported (see `supports`).
    """
    from . import gpu

    return gpu.all_reduce(x, memory)


def all_gather(x: Tensor, memory: PeerMemory) -> Tensor:
    """Concatenate all ranks' x [n, ...] in rank order: [size * n, ...], bitwise equal on all ranks.

    x's bits are unchanged, except that an aligned 32-bit word of two negative zeros becomes zeros. So x may contain
    values of other types, unless one is 0x80008000. Raises `ValueError` as `all_reduce` does.
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
    """Return whether `dispatch` supports the tokens, and is faster than a library. For `combine`, use `supports`."""
    if not tokens.hidden.is_cuda:
        return False
    from . import gpu

    return gpu.supports_dispatch(tokens, memory)


def dispatch(tokens: RoutedTokens, table: ExpertMap, places: RankSlots, memory: PeerMemory) -> DispatchedTokens:
    """Send each token to the ranks that have at least one of its experts, and every token's routing to all ranks.

    The result is the same as `all_gather` of the tokens and `map_experts` of their experts. This rank's own tokens are
    added to `table.loads`. All ranks must have equally many tokens. Raises `ValueError` as `all_reduce` does.
    """
    from . import gpu

    return gpu.dispatch(tokens, table, places, memory)


def combine(partial: Tensor, visits: Tensor, memory: PeerMemory) -> Tensor:
    """Return the bits of `reduce_scatter` of partial [size * T, hidden_size], with 0 for rows that were not dispatched.

    Only the rows that `dispatch` sent are read and sent back; `visits` is its record of them. Raises `ValueError` as
    `all_reduce` does.
    """
    from . import gpu

    return gpu.combine(partial, visits, memory)


def warm_up(memory: PeerMemory, dtype: torch.dtype) -> None:
    """Launch every kernel that collectives of a dtype use, for any size, so that nothing is compiled later.

    All ranks call it. It leaves out `dispatch` and `combine`, which only captured steps use, whose sizes are known.
    """
    from . import gpu

    gpu.warm_up(memory, dtype)
