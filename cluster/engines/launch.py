"""What a replica, the workers of its group and the ranks of these tell each other before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from baton.cluster.contracts import Role
from baton.cluster.spec import FleetSpec
from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.tiers.settings import TierSettings

STOP_S = 3.0  # for workers to end by themselves, where tiers have nothing to save


@dataclass(frozen=True)
class EngineLaunch:
    """Everything that a process needs to become a member of one group of an application."""

    spec: FleetSpec
    role: Role
    group_id: str
    app: str
    key: ClusterKey

    @property
    def tensor_parallel_size(self) -> int:
        return self.spec.engine_config(self.role).tensor_parallel_size

    @property
    def world_size(self) -> int:
        return self.spec.engine_config(self.role).world_size

    @property
    def transfers_kv(self) -> bool:
        return self.role is not Role.UNIFIED

    @property
    def tiers(self) -> TierSettings | None:
        return self.spec.fleets.present[self.role].kv_tiers

    @property
    def stop_s(self) -> float:
        """For its workers to end by themselves, before they are ended by force."""
        return STOP_S + (0.0 if self.tiers is None else self.tiers.save_s)


@dataclass(frozen=True)
class Doors:
    """Where a leader's tensor-parallel ranks join it for what they do together; empty where they do not."""

    reads: str = ""  # of peers' blocks
    copies: str = ""  # between blocks and the host buffer
    tiers: str = ""


@dataclass(frozen=True)
class Opening:
    """What one rank brings to its group."""

    rendezvous: str = ""  # of rank 0: where all meet, "host:port"
    doors: Doors = Doors()  # of a leader
    gpus: tuple[str, ...] = ()  # that Ray has reserved for it


@dataclass(frozen=True)
class Place:
    """What one rank is told of its group; empty where there is nobody to meet."""

    rendezvous: str = ""
    doors: Doors = Doors()  # of its leader
    gpus: tuple[str, ...] = ()  # of all ranks of its machine, by local rank: peers reach into each other's memory
