"""Sizes that follow from an application and a model's config.json: bytes of a hand-off, memory and disk of each host.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.cluster.contracts import Role
from baton.cluster.spec import FleetSpec
from baton.engine.core.layout import BLOCK_SIZE, CacheKind, CacheLayout, GroupLayout
from baton.kv_transfer.settings import TierSettings

GB = 10**9


def handoff_bytes(caches: CacheLayout, tensor_parallel_size: int, num_tokens: int) -> int:
    """Return the bytes that the ranks of a decode engine read for a prompt: of each group, what later tokens need."""
    ranks = [caches.of_rank(rank, tensor_parallel_size) for rank in range(tensor_parallel_size)]
    return sum(_handed_blocks(group, num_tokens) * group.blocks.block_bytes for each in ranks for group in each.groups)


def _handed_blocks(group: GroupLayout, num_tokens: int) -> int:
    if group.kind is CacheKind.STATE:
        return 1
    first = 0 if group.window is None else max(0, num_tokens - group.window + 1) // BLOCK_SIZE
    return -(-num_tokens // BLOCK_SIZE) - first


@dataclass(frozen=True)
class HostNeeds:
    """Bytes of host memory and disk that one worker needs, or all workers of one node."""

    tiers: int = 0  # `kv_tiers.host_bytes`
    buffer: int = 0  # `transfer.buffer_bytes`
    model: int = 0  # weights, blocks and steps, if there is no GPU
    disk: int = 0  # `kv_tiers.disk_bytes`

    @property
    def memory(self) -> int:
        return self.tiers + self.buffer + self.model

    def __add__(self, other: HostNeeds) -> HostNeeds:
        return HostNeeds(
            self.tiers + other.tiers, self.buffer + other.buffer, self.model + other.model, self.disk + other.disk
        )


def needs_of_worker(spec: FleetSpec, role: Role, model: int) -> HostNeeds:
    """Return the needs of one worker; `model` is the number of the model's bytes in host memory."""
    tiers, transfer = spec.fleets.present[role].kv_tiers, spec.transfer
    by_host = role is not Role.UNIFIED and transfer.buffer == "host"
    return HostNeeds(
        tiers=0 if tiers is None else tiers.host_bytes,
        buffer=transfer.buffer_bytes if by_host else 0,
        model=model,
        disk=0 if tiers is None else tiers.disk_bytes,
    )


def find_too_small_tiers(tiers: TierSettings, fewest_bytes: int, num_groups: int) -> Iterator[str]:
    """Yield a line for each tier of a rank in which one of the model's cache groups would have no block."""
    for name in ("host_bytes", "disk_bytes"):
        given = getattr(tiers, name)
        if 0 < given < fewest_bytes:
            lacking = "some cache groups" if num_groups > 1 else "it"
            yield f"kv_tiers.{name} is {given}, which has no block for {lacking}: give at least {fewest_bytes}"


def needs_of_nodes(workers: Sequence[tuple[int, HostNeeds]]) -> list[HostNeeds]:
    """Return the needs of each node, given the node and the needs of each worker."""
    nodes = [HostNeeds()] * (max((node for node, _ in workers), default=-1) + 1)
    for node, needs in workers:
        nodes[node] += needs
    return nodes


def find_overcommitted(nodes: Sequence[HostNeeds], memory_bytes: int | None, disk_bytes: int | None) -> Iterator[str]:
    """Yield a line for each node that has too little memory or disk; a size of None is unknown."""
    for node, needs in enumerate(nodes):
        if memory_bytes is not None and needs.memory > memory_bytes:
            parts = (
                ("kv_tiers.host_bytes", needs.tiers),
                ("transfer.buffer_bytes", needs.buffer),
                ("models", needs.model),
            )
            named = ", ".join(f"{size / GB:.1f} GB of {name}" for name, size in parts if size)
            yield (
                f"node {node}: its workers take {needs.memory / GB:.1f} GB of the host's memory ({named}), it has"
                f" {memory_bytes / GB:g}: give less, or fewer workers a node"
            )
        if disk_bytes is not None and needs.disk > disk_bytes:
            yield (
                f"node {node}: its workers take {needs.disk / GB:.1f} GB of disk (kv_tiers.disk_bytes), it has"
                f" {disk_bytes / GB:g}: give less, or fewer workers a node"
            )
