"""KV transfers and tiers of one rank, and the sockets that connect the ranks of a tensor-parallel group.

    rank 0 of a tensor-parallel group   open_sockets ── connect, open_tiers ── close, or abandon
    other ranks                         follow_leader: connects to those sockets

torch and NIXL are imported late, so that only an engine's own process loads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.engine.core.connector import KVConnector
from baton.engine.core.regions import CacheRegion
from baton.engine.core.tiers import KVTiers
from baton.engine.parallel.member import Member
from baton.kv_transfer.settings import LocalEngine

from .launch import EngineLaunch, GroupEndpoints

if TYPE_CHECKING:
    from baton.kv_transfer.connector import TransferConnector
    from baton.kv_transfer.group.rpc import GroupSocket
    from baton.kv_transfer.staging.host_buffer import HostBufferConnector
    from baton.kv_transfer.tiers.store import TierStore


class KVResources:
    """KV transfers and tiers of an engine's rank 0. When they have events they call `wake`, from any thread."""

    def __init__(self, launch: EngineLaunch, me: LocalEngine) -> None:
        self._launch, self._me = launch, me
        self.wake: Callable[[], None] = lambda: None  # set once the engine is served
        self._read_socket: GroupSocket | None = None
        self._copy_socket: GroupSocket | None = None
        self._tier_socket: GroupSocket | None = None
        self.connector: TransferConnector | HostBufferConnector | None = None
        self.tiers: TierStore | None = None

    def open_sockets(self) -> GroupEndpoints:
        """Open the sockets to which the other ranks of the tensor-parallel group connect."""
        from baton.kv_transfer.group.rpc import GroupSocket

        launch, size = self._launch, self._launch.tensor_parallel_size
        if launch.transfers_kv:
            self._read_socket = GroupSocket(size, self._me.host, self._me.key)
            if launch.spec.transfer.buffer != "device":
                self._copy_socket = GroupSocket(size, self._me.host, self._me.key)
        if launch.tiers is not None:
            self._tier_socket = GroupSocket(size, self._me.host, self._me.key)
        sockets = (self._read_socket, self._copy_socket, self._tier_socket)
        return GroupEndpoints(*("" if socket is None else socket.address for socket in sockets))

    def abandon(self) -> None:
        """Close everything after the engine failed to start: the sockets last, since threads of the others use them.

        They stay open if one of our own threads has not ended, because it may use them.
        """
        if not self.close():
            return
        for socket in (self._read_socket, self._copy_socket, self._tier_socket):
            if socket is not None:
                socket.close()

    def connect(self, region: CacheRegion) -> KVConnector:
        from baton.kv_transfer.staging.host_buffer import open_connector

        self.connector = open_connector(
            region,
            self._me,
            settings=self._launch.spec.transfer,
            wake=lambda: self.wake(),
            read_socket=self._read_socket,
            copy_socket=self._copy_socket,
        )
        return self.connector

    def open_tiers(self, region: CacheRegion) -> KVTiers:
        from baton.kv_transfer.tiers.store import TierStore

        assert self._launch.tiers is not None, "called only where the fleet has tiers"
        self.tiers = TierStore(
            region,
            self._launch.tiers,
            name=f"{self._me.engine_id}:tiers",
            cpu_affinity=self._launch.spec.transfer.cpu_affinity,
            wake=lambda: self.wake(),
            group_socket=self._tier_socket,
        )
        return self.tiers

    def close(self) -> bool:
        """Close transfers, which peers may be waiting for, then tiers, which may first save their blocks.

        Returns False if a thread of theirs has not ended in time.
        """
        transfers_ended = self.connector is None or self.connector.close()
        tiers_ended = self.tiers is None or self.tiers.close()
        return transfers_ended and tiers_ended


def follow_leader(
    launch: EngineLaunch, engine_id: str, member: Member, leader: GroupEndpoints, ending: contextlib.ExitStack
) -> Callable[[CacheRegion], None]:
    """Return a function that connects a rank, once it has its KV region, to its leader, until `ending` is closed."""
    from baton.kv_transfer.group.rpc import GroupRank
    from baton.kv_transfer.staging.group_copies import follow_connector
    from baton.kv_transfer.tiers.group import follow_tiers

    settings = launch.spec.transfer
    me = GroupRank(member.tp_rank, member.tensor_parallel_size, launch.key)

    def connect(region: CacheRegion) -> None:
        if leader.reads:
            reader = follow_connector(
                region,
                me,
                settings=settings,
                leader=leader.reads,
                copies=leader.copies,
                engine_id=engine_id,
            )
            ending.callback(reader.close)
        if leader.tiers:
            assert launch.tiers is not None, "a leader opens a socket only where the fleet has tiers"
            tiers = follow_tiers(
                region,
                me,
                launch.tiers,
                leader=leader.tiers,
                name=f"{engine_id}:tiers:{member.tp_rank}",
                cpu_affinity=settings.cpu_affinity,
            )
            ending.callback(tiers.close)

    return connect
