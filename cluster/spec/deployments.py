"""The `deployments` beside an application's `args` in a Serve config file: settings that can change while it runs.

Serve gives all deployments of an application one version, derived from its `args`: any change there replaces every
engine and every gateway. Changes in `deployments` are applied to running deployments:

args: {gateway: {max_inflight_requests: 4096}, ...}
deployments:
  - name: gateway
    user_config:                              # overrides the same names in `args`; see `Change` for each setting
      gateway: {max_inflight_requests: 512}
      autoscaling: {ttft_s: 0.5}
    num_replicas: 3                           # Serve's options, with load balancing `internal`
  - name: decode
    num_replicas: 3                           # of a fleet that is not autoscaled

Other options are refused, since they would contradict `args`: the placement of ranks, the drain times, the autoscaler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.cluster.contracts import LoadBalancing, Role
from baton.cluster.gateway.settings import Change, change_of
from baton.engine.strict_model import hint

from .parts import GatewaySpec, InvalidSpec

GATEWAY = "gateway"
SIZE = "num_replicas"
USER_CONFIG = "user_config"
ACTOR_OPTIONS = "ray_actor_options"
SURGE = "max_surge_percent"
GATEWAY_OPTIONS = (SIZE, USER_CONFIG, SURGE, ACTOR_OPTIONS)
BOOKED = ("num_cpus", "resources")  # keys that `ray_actor_options` may have
SECTIONS = (GATEWAY, "autoscaling")  # sections of `args` that `user_config` may override
INSTEAD = {  # refused option -> settings in `args` to use instead; `{}` is the path of the fleet or the gateways
    "autoscaling_config": "give fleets.*.min_replicas and max_replicas, and `autoscaling`",
    "graceful_shutdown_timeout_s": "give {}.drain_timeout_s",
    "max_ongoing_requests": "give gateway.max_inflight_requests",
    SURGE: "give {}.max_surge_percent",
    "placement_group_bundles": "give {}.num_cpus and {}.resources",
    ACTOR_OPTIONS: "give {}.num_cpus and {}.resources",
}


def with_deployments(args: Mapping[str, Any], deployments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arguments with the changes in `deployments`. Raises `InvalidSpec` for options that cannot be there.

    Errors in `args` itself are left to `load_spec`.
    """
    changed, seen = dict(args), set[str]()
    for index, given in enumerate(deployments):
        where = f"deployments.{index}"
        name = _name_of(where, given, args)
        if name in seen:
            raise InvalidSpec(f"{where}.name: {name!r} is given twice")
        seen.add(name)
        allowed = GATEWAY_OPTIONS if name == GATEWAY else (SIZE,)
        for option in given.keys() - {"name", *allowed}:
            place = GATEWAY if name == GATEWAY else f"fleets.{name}"
            instead = INSTEAD.get(option, f"only {', '.join(allowed)} may be given").replace("{}", place)
            raise InvalidSpec(f"deployments: {option} of {name} follows from `args`: {instead}")
        if SIZE in given:
            changed = _sized(changed, name, _size_of(name, given[SIZE]))
        if name == GATEWAY:
            changed = with_user_config(_with_options(changed, given), given.get(USER_CONFIG))
    return changed


def with_user_config(args: Mapping[str, Any], user_config: Any) -> dict[str, Any]:
    """Return the arguments overridden by a `user_config`. Raises `InvalidSpec` for settings that it cannot change.

    Mappings are merged, other values replaced. Values are left to `load_spec` to check.
    """
    changed = dict(args)
    if user_config is None:
        return changed
    where = f"deployments: {USER_CONFIG} of {GATEWAY}"
    if not isinstance(user_config, Mapping):
        raise InvalidSpec(f"{where} must be a mapping with {' and '.join(SECTIONS)}")
    for section, values in user_config.items():
        if section not in SECTIONS:
            raise InvalidSpec(f"{where}: {section!r} cannot change while the application runs: give it in `args`")
        if not isinstance(values, Mapping):
            raise InvalidSpec(f"{where}: {section} must be a mapping")
        if section == GATEWAY:
            _check_changes(where, values, args.get("load_balancing", LoadBalancing.INTERNAL))
        changed[section] = _merged(changed.get(section), values)
    return changed


def _check_changes(where: str, values: Mapping[str, Any], load_balancing: Any) -> None:
    is_internal = load_balancing == LoadBalancing.INTERNAL
    options = {"replicas": SIZE, SURGE: SURGE} | (
        {name: f"{ACTOR_OPTIONS}.{name}" for name in BOOKED} if is_internal else {}
    )
    for name in values:
        if name in options:
            raise InvalidSpec(f"{where}: gateway.{name} is an option of the deployment: give {options[name]} beside it")
        if name in GatewaySpec.model_fields and change_of(GatewaySpec, name) is Change.ALL:
            raise InvalidSpec(f"{where}: gateway.{name} is the engines' setting, too: give it in `args`")


def _merged(old: Any, new: Mapping[str, Any]) -> Any:
    if not isinstance(old, Mapping):
        return dict(new) if old is None else old  # `args` is invalid there, which `load_spec` will report
    both = {
        name: _merged(old[name], value) for name, value in new.items() if name in old and isinstance(value, Mapping)
    }
    return {**old, **new, **both}


def _with_options(args: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with those options of the gateways' deployment that are settings there."""
    own = {SURGE: given[SURGE]} if SURGE in given else {}
    booked = given.get(ACTOR_OPTIONS, {})
    unknown = [name for name in booked if name not in BOOKED] if isinstance(booked, Mapping) else [str(booked)]
    if unknown:
        raise InvalidSpec(f"deployments: {ACTOR_OPTIONS} of {GATEWAY}: {unknown[0]}: may hold {' and '.join(BOOKED)}")
    return _with_gateway(args, own | dict(booked)) if own or booked else args


def _with_gateway(args: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return args | {GATEWAY: _merged(args.get(GATEWAY), own)}


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
        return _with_gateway(args, {"replicas": size})
    fleet = args["fleets"][name]
    if not isinstance(fleet, dict):
        return args
    if fleet.get("max_replicas") is not None:
        raise InvalidSpec(
            f"deployments: {SIZE} of {name}: the autoscaler decides it, between min_replicas and max_replicas of "
            f"fleets.{name}; leave one of them out"
        )
    return args | {"fleets": args["fleets"] | {name: fleet | {"replicas": size}}}
