"""Placement of gateways beside engines: one a node or one a rank, and the ports at which they listen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from baton.cluster.contracts import EngineRecord, LoadBalancing, Reach


@dataclass(frozen=True)
class GatewayPlacement:
    """A node, or a rank on its node, that is to have a gateway."""

    reach: Reach
    node_id: str
    node_ip: str

    @property
    def name(self) -> str:
        rank = f"-rank-{self.reach.rank}" if self.reach.mode is LoadBalancing.EXTERNAL else ""
        return f"{self.node_id}{rank}"


def gateway_placements(mode: LoadBalancing, engines: Iterable[EngineRecord]) -> dict[str, GatewayPlacement]:
    """Return the placements of all gateways by name, in the order of the ranks that they serve."""
    placements: dict[str, GatewayPlacement] = {}
    for engine in engines:
        if engine.role.writes_answers:
            external = mode is LoadBalancing.EXTERNAL
            reach = Reach(mode=mode, rank=engine.rank) if external else Reach(mode=mode, node_id=engine.node_id)
            placement = GatewayPlacement(reach, engine.node_id, engine.node_ip)
            placements.setdefault(placement.name, placement)
    return placements


class PortAllocator:
    """Gives out `first`, `first + 1`, ... to the gateways of one machine; each machine has the same ports to give."""

    def __init__(self, first: int) -> None:
        self.first = first
        self._taken: dict[str, dict[int, str]] = defaultdict(dict)  # by machine: port to placement

    def port_of(self, placement: GatewayPlacement) -> int:
        """Return the port that the placement has, else allocate the lowest that is free on its machine."""
        taken = self._taken[placement.node_ip]
        port = next((port for port, name in taken.items() if name == placement.name), None)
        if port is None:
            port = self.first
            while port in taken:
                port += 1
            taken[port] = placement.name
        return port

    def reserve(self, placement: GatewayPlacement, port: int) -> None:
        """Allocate a port at which a gateway of an earlier controller listens already."""
        self._taken[placement.node_ip][port] = placement.name

    def release(self, placement: GatewayPlacement) -> None:
        taken = self._taken[placement.node_ip]
        for port in [port for port, name in taken.items() if name == placement.name]:
            del taken[port]
