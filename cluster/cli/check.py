"""`baton check`: what can be known of a file without starting anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from baton.cluster.counted import counted
from baton.cluster.planning.plan import check_model
from baton.cluster.spec import (
    FleetSpec,
    has_model,
    is_ray_cluster,
    load_ray_cluster,
    load_specs,
    read_mapping,
)


def judgements_of(file: Path) -> Iterator[tuple[str, bool]]:
    """What is in a file that can work, line by line, and whether all of it was checked. Raises `InvalidSpec`."""
    content = read_mapping(file)
    if is_ray_cluster(content):
        cluster = load_ray_cluster(content)
        workers = counted(cluster.max_workers, "worker")
        yield f"{cluster.name} is fine: a Ray cluster of a head and up to {workers}", True
        return
    for name, spec in load_specs(content, needs_model=False).items():
        yield _judged(name, spec)


def _judged(name: str, spec: FleetSpec) -> tuple[str, bool]:
    whole = has_model(spec.model)
    if whole:
        check_model(spec)
    fleets = ", ".join(f"{fleet.spelled} {role}" for role, fleet in spec.fleets.present.items())
    unchecked = "" if whole else f" (not checked: how {spec.model}, not on this machine, divides)"
    return f"{name} is fine: {spec.served_model_id}, {fleets}{unchecked}", whole
