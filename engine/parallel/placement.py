"""Placement of experts on ranks, and its rebalancing by the number of tokens that each expert got.

    physical expert   0 1 2 | 3 4 5 | 6 7 8          rank r has `slots` of them, from r * slots on
    logical expert    0 1 2 | 3 4 5 | 6 7 0          busy ones have replicas, which tokens use in turn

All inputs and results are integers, so that every rank computes the same by itself.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertMove:
    """A copy of weights from one physical expert to another."""

    source: int
    target: int


@dataclass(frozen=True)
class ExpertPlacement:
    """The logical experts that each rank holds, in the order of its slots. No rank holds one twice."""

    held: tuple[tuple[int, ...], ...]

    @classmethod
    def initial(cls, num_experts: int, num_redundant: int, num_ranks: int) -> ExpertPlacement:
        """Place experts in order, and the first `num_redundant` again at the end. `num_ranks` must divide the total."""
        slots, rest = divmod(num_experts + num_redundant, num_ranks)
        assert not rest, f"{num_experts} + {num_redundant} experts do not divide by {num_ranks}"
        assert slots <= num_experts, "more replicas than ranks"
        return cls(tuple(tuple(i % num_experts for i in range(r * slots, (r + 1) * slots)) for r in range(num_ranks)))

    @property
    def num_ranks(self) -> int:
        return len(self.held)

    @property
    def slots(self) -> int:
        """The number of experts on each rank."""
        return len(self.held[0])

    @property
    def num_experts(self) -> int:
        return 1 + max(map(max, self.held))

    @property
    def most_replicas(self) -> int:
        """The most replicas that one expert can have: at most one on each rank, as every other expert needs a place."""
        return min(self.num_ranks, 1 + self.num_ranks * self.slots - self.num_experts)

    def places(self, rank: int) -> range:
        """Return the physical experts of a rank."""
        return range(rank * self.slots, (rank + 1) * self.slots)

    def replicas(self) -> list[list[int]]:
        """Return the physical experts of each logical one."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for place, expert in enumerate(expert for rank in self.held for expert in rank):
            found[expert].append(place)
        return found

    def rank_loads(self, loads: Sequence[int]) -> list[float]:
        """Return the tokens that each rank serves, given the tokens of each expert."""
        replicas = self.replicas()
        return [sum(loads[expert] / len(replicas[expert]) for expert in rank) for rank in self.held]

    def imbalance(self, loads: Sequence[int]) -> float:
        """Return the load of the busiest rank over the mean; 1 is best: all wait for the busiest. 0 without loads."""
        of_ranks = self.rank_loads(loads)
        return max(of_ranks) * self.num_ranks / sum(of_ranks) if any(loads) else 0.0

    def balanced(self, loads: Sequence[int]) -> ExpertPlacement:
        """Return a placement under which these loads would be almost balanced, with few experts moved.

        Greedy: the busiest expert gets another replica until all places are taken; then each replica, the busiest
        first, goes to the rank with the lowest load.
        """
        counts = self._count_replicas(loads)
        bins = self._pack(loads, counts)
        return ExpertPlacement(tuple(self._in_old_places(bins)))

    def _count_replicas(self, loads: Sequence[int]) -> list[int]:
        """Return the number of replicas of each expert. Their sum is the number of places."""
        counts = [1] * self.num_experts
        heap = [(-float(load), expert) for expert, load in enumerate(loads)]
        heapq.heapify(heap)
        for _ in range(self.num_ranks * self.slots - self.num_experts):
            while counts[heap[0][1]] == self.num_ranks:
                heapq.heappop(heap)
            expert = heap[0][1]
            counts[expert] += 1
            heapq.heapreplace(heap, (-loads[expert] / counts[expert], expert))
        return counts

    def _pack(self, loads: Sequence[int], counts: Sequence[int]) -> list[set[int]]:
        """Assign experts to ranks. If all ranks with room have the expert already, one gets another that it lacks."""
        share = [load / count for load, count in zip(loads, counts, strict=True)]
        order = sorted(range(self.num_experts), key=lambda expert: (-share[expert], expert))
        bins: list[set[int]] = [set() for _ in self.held]
        filled = [0.0] * self.num_ranks
        for expert in itertools.chain.from_iterable([expert] * counts[expert] for expert in order):
            free = [rank for rank, its in enumerate(bins) if len(its) < self.slots]
            fitting = [rank for rank in free if expert not in bins[rank]]
            rank = min(fitting or free, key=lambda rank: (filled[rank], rank))
            taken = expert if fitting else next(other for other in order if other not in bins[rank])
            bins[rank].add(taken)
            filled[rank] += share[taken]
        return bins

    def _in_old_places(self, bins: list[set[int]]) -> list[tuple[int, ...]]:
        """Give each rank the bin with which it shares most experts, and keep these in their places."""
        chosen: dict[int, set[int]] = {}
        overlaps = sorted(
            (-len(its.intersection(old)), rank, number)
            for rank, old in enumerate(self.held)
            for number, its in enumerate(bins)
        )
        left = set(range(len(bins)))
        for _, rank, number in overlaps:
            if rank not in chosen and number in left:
                chosen[rank] = bins[number]
                left.remove(number)
        held = []
        for rank, old in enumerate(self.held):
            new = sorted(chosen[rank].difference(old), reverse=True)
            held.append(tuple(expert if expert in chosen[rank] else new.pop() for expert in old))
        return held

    def moves_to(self, target: ExpertPlacement) -> list[ExpertMove]:
        """Return the copies that lead to the placement `target`, ordered by target. Replicas are sources in turn."""
        replicas = self.replicas()
        moves = []
        for rank, (old, new) in enumerate(zip(self.held, target.held, strict=True)):
            for slot, (before, after) in enumerate(zip(old, new, strict=True)):
                if before != after:
                    sources = replicas[after]
                    moves.append(ExpertMove(sources[rank % len(sources)], rank * self.slots + slot))
        return moves
