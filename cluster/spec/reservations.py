"""The resources that an application reserves with Ray, and the messages if a cluster lacks them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from baton.cluster.contracts import Role
from baton.cluster.pluralize import pluralize

from .application import FleetSpec

SMALLEST_AMOUNT = 0.001  # of a Ray resource, for bundles that must not be empty
WHOLE_GPU = 10_000  # Ray counts to four decimals
REPLICA_CPUS = 0.1  # that a group's replica reserves in addition to its ranks

Bundle = dict[str, float]  # Ray's resources by name


class Reservations:
    """The resources that the workers of an application reserve in a cluster with a number of GPUs.

    The `missing_...` methods explain, for the user, why the cluster cannot place all engines; "" if it can.
    """

    def __init__(self, spec: FleetSpec, cluster_gpus: float) -> None:
        self._spec = spec
        self._cluster_gpus = cluster_gpus

    def gpus_of(self, role: Role) -> float:
        """Return the number of GPUs that a worker of this role reserves."""
        given = self._spec.fleets.present[role].num_gpus
        if given is not None:
            return given
        device = self._spec.engine_config(role).device
        return 1.0 if device == "cuda" or (device == "auto" and self._cluster_gpus > 0) else 0.0

    def bundle_of(self, role: Role) -> Bundle:
        """Return the resources that one worker of this role reserves."""
        fleet = self._spec.fleets.present[role]
        wanted = {"CPU": fleet.num_cpus, "GPU": self.gpus_of(role), **fleet.resources}
        return {name: amount for name, amount in wanted.items() if amount > 0} or {"CPU": SMALLEST_AMOUNT}

    def bundles_of(self, role: Role) -> list[Bundle]:
        """Return the bundles that one group reserves, one for each rank.

        The first bundle also has the CPUs of the group's replica, so that this runs on the machine of a rank.
        """
        rank = self.bundle_of(role)
        first = {**rank, "CPU": round(rank.get("CPU", 0.0) + REPLICA_CPUS, 4)}  # Ray counts to four decimals
        return [first] + [rank] * (self._spec.engine_config(role).world_size - 1)

    def missing_gpus(self) -> str:
        """Explain why the cluster has too few GPUs, even if all are free."""
        ranks = {
            role: fleet.first_replicas * self._spec.engine_config(role).world_size
            for role, fleet in self._spec.fleets.present.items()
        }
        needed = num_gpus(self.gpus_of(role) for role, count in ranks.items() for _ in range(count))
        if needed <= self._cluster_gpus:
            return ""
        return (
            f"{pluralize(needed, 'GPU')} to reserve for {pluralize(sum(ranks.values()), 'rank')}, the cluster has "
            f"{self._cluster_gpus:g}: give fewer replicas, smaller groups (tensor_parallel_size, data_parallel_size), "
            "let engines share a GPU (fleets.*.num_gpus: 0.5), or run them on CPUs (engine.device: cpu)"
        )

    def missing_markers(self, total: Mapping[str, float]) -> str:
        """Explain which resources of the fleets no node has, given the cluster's resources in `total`."""
        missing = (
            f"fleets.{role}.resources: no node has {name}; start Ray with it on those that the fleet belongs on "
            f"(ray start --resources='{{\"{name}\": 1}}')"
            for role, fleet in self._spec.fleets.present.items()
            for name in fleet.markers
            if total.get(name, 0) == 0
        )
        return "\n".join(missing)

    def missing_capacity(self, free: Mapping[str, float], total: Mapping[str, float]) -> str:
        """Explain which resources are taken now: `free` of the cluster's resources in `total` are not."""
        needs: defaultdict[str, float] = defaultdict(float)
        for role, fleet in self._spec.fleets.present.items():
            for bundle in self.bundles_of(role) * fleet.first_replicas:
                for name, amount in bundle.items():
                    needs[name] += amount
        lacking = [
            f"{amount:g} {name} (free {free.get(name, 0):g} of {total.get(name, 0):g})"
            for name, amount in needs.items()
            if amount > free.get(name, 0) + SMALLEST_AMOUNT / 2
        ]
        if not lacking:
            return ""
        return (
            f"the cluster has no room for all engines: they reserve {', '.join(lacking)}. Give fewer or smaller "
            "groups, less num_cpus or resources a fleet, or add machines"
        )


def num_gpus(amounts: Iterable[float]) -> float:
    """Return how many GPUs workers take that reserve these amounts, if Ray places the largest first.

    A share is on a single GPU: on the one that has the least left of those that it fits on.
    """
    needed, left = 0.0, Counter[int]()  # how many GPUs have so many ten-thousandths left
    for amount in sorted(amounts, reverse=True):
        share = round(amount * WHOLE_GPU)
        if share >= WHOLE_GPU or not share:
            needed += amount
            continue
        free = min((free for free, count in left.items() if count and free >= share), default=None)
        if free is None:
            needed, free = needed + 1, WHOLE_GPU
        else:
            left[free] -= 1
        left[free - share] += 1
    return needed
