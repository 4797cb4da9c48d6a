"""Policies for fleet sizes in a simulation: the autoscaler, fixed numbers, and Serve's default policy."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.cluster.autoscaling.load_samples import GatewayLoad
from baton.cluster.autoscaling.scaler import Scaler
from baton.cluster.contracts import Bounds, EngineGroup, EnginePulse, Role, ScalePlan


@dataclass
class SimulatedFleet:
    """The groups of one role, and their reports."""

    groups: list[EngineGroup] = field(default_factory=list)
    pulses: dict[str, list[EnginePulse]] = field(default_factory=dict)
    starting: int = 0


class Sizer(Protocol):
    """Decides the sizes of fleets."""

    name: str

    def first(self) -> Mapping[Role, int]:
        """Return the number of groups of each fleet at the start."""
        ...

    def sizes(self, now_s: float, gateways: GatewayLoad, fleets: Mapping[Role, SimulatedFleet]) -> Mapping[Role, int]:
        """Decide the number of groups of each fleet, once a second."""
        ...

    def leaving(self, role: Role) -> list[str]:
        """Return the groups that are to be stopped before others."""
        ...


class FixedSizes:
    """Sizes that never change."""

    def __init__(self, sizes: Mapping[Role, int]) -> None:
        self.name = "fixed " + " + ".join(str(size) for size in sizes.values())
        self._sizes = sizes

    def first(self) -> Mapping[Role, int]:
        return self._sizes

    def sizes(self, now_s: float, gateways: GatewayLoad, fleets: Mapping[Role, SimulatedFleet]) -> Mapping[Role, int]:
        return self._sizes

    def leaving(self, role: Role) -> list[str]:
        return []


class Autoscaled:
    """The directory's own scaler."""

    def __init__(self, plan: ScalePlan) -> None:
        self.name = "autoscaled"
        self._plan, self._scaler = plan, Scaler(plan)
        self._scaler.start_from(dict(self.first()))

    def first(self) -> Mapping[Role, int]:
        return {role: bounds.min_replicas for role, bounds in self._plan.fleets.items()}

    def sizes(self, now_s: float, gateways: GatewayLoad, fleets: Mapping[Role, SimulatedFleet]) -> Mapping[Role, int]:
        self._scaler.update_gateway("gateway", gateways)
        groups = [group for fleet in fleets.values() for group in fleet.groups]
        for fleet in fleets.values():
            for group in fleet.groups:
                self._scaler.update_group(group, fleet.pulses[group.group_id])
        self._scaler.update(now_s, ["gateway"], groups)
        wanted = {role: self._scaler.wanted(role) for role in self._plan.fleets}
        return {role: each.replicas for role, each in wanted.items() if each is not None}

    def leaving(self, role: Role) -> list[str]:
        wanted = self._scaler.wanted(role)
        return wanted.leaving if wanted is not None else []


class OngoingRequests:
    """Ray Serve's default policy, applied to each fleet separately: ongoing requests / `target_ongoing_requests`.

    A change is made if it has pointed in the same direction for the whole delay. Serve counts the requests in its
    handles and replicas; here, the requests in the engines count, and for prefill fleets also those that wait in the
    gateway.
    """

    def __init__(self, plan: ScalePlan, target_ongoing_requests: Mapping[Role, float]) -> None:
        self.name = "ongoing requests"
        self._plan, self._targets = plan, target_ongoing_requests
        self._sizes = {role: max(1, bounds.min_replicas) for role, bounds in plan.fleets.items()}
        self._ongoing: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in plan.fleets}
        # For each fleet: the direction in which it should change, and since when.
        self._since_s: dict[Role, tuple[int, float]] = {}

    def first(self) -> Mapping[Role, int]:
        return dict(self._sizes)

    def sizes(self, now_s: float, gateways: GatewayLoad, fleets: Mapping[Role, SimulatedFleet]) -> Mapping[Role, int]:
        for role, bounds in self._plan.fleets.items():
            ongoing = sum(pulse.num_requests for pulses in fleets[role].pulses.values() for pulse in pulses)
            ongoing += gateways.unplaced if role is not Role.DECODE else 0
            self._sizes[role] = self._resize(role, bounds, now_s, ongoing)
        return dict(self._sizes)

    def leaving(self, role: Role) -> list[str]:
        return []

    def _resize(self, role: Role, bounds: Bounds, now_s: float, ongoing: int) -> int:
        window, size = self._ongoing[role], self._sizes[role]
        window.append((now_s, ongoing))
        while window[0][0] < now_s - self._plan.look_back_period_s:
            window.popleft()
        mean = sum(count for _, count in window) / len(window)
        desired = bounds.clip(max(1, math.ceil(mean / self._targets[role])))
        direction = (desired > size) - (desired < size)
        if self._since_s.get(role, (0, 0.0))[0] != direction:
            self._since_s[role] = (direction, now_s)
        delay_s = self._plan.upscale_delay_s if direction > 0 else self._plan.downscale_delay_s
        if direction and now_s - self._since_s[role][1] >= delay_s:
            del self._since_s[role]
            return desired
        return size
