"""A process's place in its group.

rank = dp_rank * tensor_parallel_size + tp_rank
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SecureSocket = Callable[[Any], None]  # given a ZMQ socket before it binds or connects


@dataclass(frozen=True, kw_only=True)
class Member:
    """One process of a group, and the way to reach the others."""

    rank: int = 0
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    rendezvous: str = ""  # "host:port" of the group's `Rendezvous`; needed if the group has more than one member
    host: str = "127.0.0.1"  # this machine's address, by which the other members reach it
    device_index: int | None = None  # of this member's GPU; None: torch's current one
    num_local: int = 1  # members on this machine, which share its cores and its memory
    local_rank: int = 0  # this member's number among them: the first one compiles for all
    start_timeout_s: float = 600.0  # longer than the start of another member may take
    secure_server: SecureSocket | None = None  # None: plans travel in the clear, from a socket open to everyone
    secure_client: SecureSocket | None = None

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def tp_rank(self) -> int:
        """Rank 0 schedules; the others follow."""
        return self.rank % self.tensor_parallel_size

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def tp_ranks(self) -> list[int]:
        """The global ranks that share this one's requests, in the order of their `tp_rank`."""
        first = self.rank - self.tp_rank
        return list(range(first, first + self.tensor_parallel_size))

    @property
    def dp_ranks(self) -> list[int]:
        """The global ranks with this one's `tp_rank`, in the order of their `dp_rank`."""
        return list(range(self.tp_rank, self.world_size, self.tensor_parallel_size))


ALONE_MEMBER = Member()
