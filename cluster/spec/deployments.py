"""The `deployments` of an application in a Serve config file, with which Serve overrides options of our deployments.

The number of replicas is a fleet's, and can so be changed while it serves (docs/operate/scaling.md). Anything else
would undo what follows from `args`: where ranks are, how long they drain, what the autoscaler decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.cluster.contracts import Role
from baton.engine.strict_model import hint

from .errors import InvalidSpec

GATEWAY = "gateway"
SIZE = "num_replicas"
INSTEAD = {  # settings in `args`; `{}`: the fleet or the gateways there
    "autoscaling_config": "give fleets.*.min_replicas and max_replicas, and `autoscaling`",
    "graceful_shutdown_timeout_s": "give {}.drain_timeout_s",
    "max_ongoing_requests": "give gateway.max_inflight_requests",
    "max_surge_percent": "give {}.max_surge_percent",
    "placement_group_bundles": "give {}.num_cpus and {}.resources",
    "ray_actor_options": "give {}.num_cpus and {}.resources",
}


def with_sizes_of(args: Mapping[str, Any], deployments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arguments with the sizes given in `deployments`. Raises `InvalidSpec` for options it must not change.

    Errors of `args` itself are left for `load_spec` to refuse.
    """
    sized, seen = dict(args), set[str]()
    for index, given in enumerate(deployments):
        where = f"deployments.{index}"
        name = _name_of(where, given, args)
        if name in seen:
            raise InvalidSpec(f"{where}.name: {name!r} is there twice")
        seen.add(name)
        for option in given.keys() - {"name", SIZE}:
            place = GATEWAY if name == GATEWAY else f"fleets.{name}"
            instead = INSTEAD.get(option, f"only {SIZE} may be given").replace("{}", place)
            raise InvalidSpec(f"deployments: {option} of {name} follows from `args`: {instead}")
        if SIZE in given:
            sized = _sized(sized, name, _size_of(name, given[SIZE]))
    return sized


def _name_of(where: str, given: Mapping[str, Any], args: Mapping[str, Any]) -> str:
    fleets = args.get("fleets")
    present = fleets if isinstance(fleets, Mapping) else {}
    known = [GATEWAY, *(role.value for role in Role if present.get(role) is not None)]
    name = given.get("name")
    if not isinstance(name, str):
        raise InvalidSpec(f"{where}.name: is missing: one of {', '.join(known)}")
    if name not in known:
        raise InvalidSpec(f"{where}.name: unknown deployment {name!r}; {hint(name, known)}")
    return name


def _size_of(name: str, given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise InvalidSpec(f"deployments: {SIZE} of {name} is {given!r}, must be a whole number, at least 1")
    return given


def _sized(args: dict[str, Any], name: str, size: int) -> dict[str, Any]:
    if name == GATEWAY:
        gateway = args.get(GATEWAY, {})
        return args | {GATEWAY: gateway | {"replicas": size}} if isinstance(gateway, dict) else args
    fleet = args["fleets"][name]
    if not isinstance(fleet, dict):
        return args
    if fleet.get("max_replicas") is not None:
        raise InvalidSpec(
            f"deployments: {SIZE} of {name}: the autoscaler decides it, between min_replicas and max_replicas of "
            f"fleets.{name}; leave one of them out"
        )
    return args | {"fleets": args["fleets"] | {name: fleet | {"replicas": size}}}
