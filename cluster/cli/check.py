"""`baton check`: checks of a file that start nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from baton.cluster.planning.model_checks import check_model, check_model_files, needs_weights
from baton.cluster.pluralize import pluralize
from baton.cluster.spec import (
    FleetSpec,
    has_model,
    is_ray_cluster,
    load_ray_cluster,
    load_specs,
    read_mapping,
)
from baton.engine.weights.checkpoint import has_weights


def check_file(file: Path) -> Iterator[tuple[str, bool]]:
    """Yield a line for each application of a file, and whether all of it was checked. Raises `InvalidSpec`."""
    content = read_mapping(file)
    if is_ray_cluster(content):
        cluster = load_ray_cluster(content)
        workers = pluralize(cluster.max_workers, "worker")
        yield f"{cluster.name} is fine: a Ray cluster of a head and up to {workers}", True
        return
    for name, spec in load_specs(content, needs_model=False).items():
        yield _check_application(name, spec)


def _check_application(name: str, spec: FleetSpec) -> tuple[str, bool]:
    unchecked = ""
    if not has_model(spec.model):
        unchecked = f"how {spec.model}, not on this machine, divides"
    else:
        check_model(spec)
        if needs_weights(spec) and not has_weights(Path(spec.model)):
            unchecked = f"the weights and the tokenizer of {spec.model}, where no weights are"
        else:
            check_model_files(spec)
    fleets = ", ".join(f"{fleet.spelled} {role}" for role, fleet in spec.fleets.present.items())
    aside = f" (not checked: {unchecked})" if unchecked else ""
    return f"{name} is fine: {spec.served_model_id}, {fleets}{aside}", not unchecked
