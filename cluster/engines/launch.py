"""The data that a replica and the workers of its group exchange before the engine runs."""

from __future__ import annotations

from dataclasses import dataclass

from baton.cluster.contracts import Role
from baton.cluster.spec import FleetSpec
from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.tiers.settings import TierSettings

STOP_S = 3.0  # for workers to end by themselves, beside the time that tiers need to save blocks


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
        """Return the seconds that workers have to end by themselves, before they are killed."""
        return STOP_S + (0.0 if self.tiers is None else self.tiers.save_s)


@dataclass(frozen=True)
class GroupEndpoints:
    """The addresses at which a leader's tensor-parallel ranks join it; empty where they do nothing together."""

    reads: str = ""  # of peers' blocks
    copies: str = ""  # between blocks and the host buffer
    tiers: str = ""


@dataclass(frozen=True)
class RankEndpoints:
    """The addresses and GPUs that one rank offers to its group."""

    rendezvous: str = ""  # of rank 0: "host:port" where all ranks meet
    group: GroupEndpoints = GroupEndpoints()  # of a leader
    gpus: tuple[str, ...] = ()  # that Ray has reserved for this rank


@dataclass(frozen=True)
class RankConfig:
    """The addresses and GPUs that one rank is to use; empty in a group of one rank."""

    rendezvous: str = ""
    group: GroupEndpoints = GroupEndpoints()  # of its leader
    gpus: tuple[str, ...] = ()  # of all ranks of its machine, by local rank: peers reach into each other's memory
