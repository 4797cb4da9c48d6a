"""Sums by writing into each other's memory, in a group of GPUs of one machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.kernels.all_reduce import PeerMemory, PeersOutOfReach, all_reduce, serves

from .groups import Group
from .rendezvous import Meeting

logger = logging.getLogger(__name__)


class SymmetricGroup(Group):
    """A group whose sums go over the memory of peers where that is faster; everything else is the group's own way."""

    def __init__(self, group: Group, memory: PeerMemory) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self._memory = memory

    def all_reduce(self, x: Tensor) -> Tensor:
        return all_reduce(x, self._memory) if serves(x, self._memory) else self._group.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._group.all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._group.reduce_scatter(x)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return self._group.all_to_all(x, sent, received)

    def agree(self, values: Sequence[int]) -> list[int]:
        return self._group.agree(values)

    def sketch(self, rank: int) -> Group:
        """Sums launch their kernels all the same, which then are recorded with those of the layers."""
        memory = PeerMemory.sketch(rank, self.size, self._memory.ended.device)
        return SymmetricGroup(self._group.sketch(rank), memory)

    def close(self) -> None:
        self._memory.end()
        self._group.close()


def with_peer_memory(name: str, group: Group, meeting: Meeting, device: torch.device) -> Group:
    """`group` with sums over its members' memory; or as it was, where they cannot reach that, said in one line of log.

    All members call it. Raises `GroupFailed` where one of them does not.
    """
    exchanges = 0

    def exchange(words: str) -> list[str]:
        nonlocal exchanges
        exchanges += 1
        meeting.put(f"{name}/memory/{exchanges}/{group.rank}", words)
        return [meeting.get(f"{name}/memory/{exchanges}/{rank}") for rank in range(group.size)]

    try:
        memory = PeerMemory.share(group.rank, group.size, device, exchange)
    except PeersOutOfReach as reason:
        log = logger.warning if group.rank == 0 else logger.debug
        log("small sums of group %s go over NCCL, and take longer: %s", name, reason)
        return group
    return SymmetricGroup(group, memory)
