"""Whether a Ray cluster has room for an application: for what it never has, Ray would wait without an end."""

from __future__ import annotations

import time
from threading import Event

import ray

from baton.cluster.spec import FleetSpec

ROOM_S = 4.0  # in which what ended just now is free again
POLL_S = 0.2


def why_no_room(spec: FleetSpec, stop: Event) -> str:
    """Empty where there is room, where an autoscaler may add machines, or once `stop` is set."""
    total = ray.cluster_resources()
    if missing := spec.missing_gpus(total.get("GPU", 0.0)) or spec.missing_markers(total):
        return missing
    until_s = time.monotonic() + ROOM_S
    while missing := spec.missing_room(ray.available_resources(), total):
        if _may_grow():
            return ""
        if time.monotonic() > until_s:
            return missing
        if stop.wait(POLL_S):
            return ""
    return ""


def _may_grow() -> bool:
    """Whether the cluster has an autoscaler: it alone knows what machines it may add."""
    from ray._private.state import state

    return state.get_max_resources_from_cluster_config() is not None
