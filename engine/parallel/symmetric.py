"""Collectives through peer memory, in a group of GPUs of one machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.kernels import p2p
from baton.kernels.p2p import Op, PeerAccessError, PeerMemory

from .groups import Group
from .rendezvous import RendezvousClient

logger = logging.getLogger(__name__)


class SymmetricGroup(Group):
    """A group that uses peer memory where that is faster (see `kernels.p2p`), and its own collectives otherwise."""

    def __init__(self, group: Group, memory: PeerMemory) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self.memory = memory

    def all_reduce(self, x: Tensor) -> Tensor:
        if p2p.supports(Op.ALL_REDUCE, x, self.memory):
            return p2p.all_reduce(x, self.memory)
        return self._group.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        if p2p.supports(Op.ALL_GATHER, x, self.memory):
            return p2p.all_gather(x, self.memory)
        return self._group.all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if p2p.supports(Op.REDUCE_SCATTER, x, self.memory):
            return p2p.reduce_scatter(x, self.memory)
        return self._group.reduce_scatter(x)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return self._group.all_to_all(x, sent, received)

    def all_max(self, values: Sequence[int]) -> list[int]:
        return self._group.all_max(values)

    def warm_up(self, dtype: torch.dtype) -> None:
        p2p.warm_up(self.memory, dtype)

    def stub(self, rank: int) -> Group:
        """Return a stub that launches the peer-memory kernels, so that they are recorded with those of the layers."""
        memory = PeerMemory.without_peers(rank, self.size, self.memory.ended.device)
        return SymmetricGroup(self._group.stub(rank), memory)

    def close(self) -> None:
        self.memory.end()
        self._group.close()

    def wait_closed(self, timeout_s: float) -> None:
        self._group.wait_closed(timeout_s)


def with_peer_memory(name: str, group: Group, rendezvous: RendezvousClient, device: torch.device) -> Group:
    """Return `group` with peer memory; or, if members cannot access it, log that and return `group` itself.

    All members must call it. Raises `GroupFailed` if one of them does not.
    """
    exchanges = 0

    def exchange(report: str) -> list[str]:
        nonlocal exchanges
        exchanges += 1
        rendezvous.put(f"{name}/memory/{exchanges}/{group.rank}", report)
        return [rendezvous.get(f"{name}/memory/{exchanges}/{rank}") for rank in range(group.size)]

    try:
        memory = PeerMemory.share(group.rank, group.size, device, exchange)
    except PeerAccessError as reason:
        log = logger.warning if group.rank == 0 else logger.debug
        log("group %s uses NCCL instead of peer memory, which takes longer for small tensors: %s", name, reason)
        return group
    return SymmetricGroup(group, memory)
