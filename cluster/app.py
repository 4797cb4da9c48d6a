"""The Serve application: `import_path: baton.cluster.app:build_app` in a Serve config file.

gateway ──┬── unified
          ├── prefill     one deployment a fleet, one replica a group of engines
          └── decode

Engine deployments are bound to the settings in `args`. Settings that a gateway accepts while it runs reach it as
Serve's `user_config`, which overrides `args`: see `spec/deployments.py`.

The application's root deployment is `gateway`: the gateways themselves (load balancing `internal`), or a controller
that keeps one gateway on each node (`hybrid`) or beside each rank (`external`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from .contracts import LoadBalancing, Role
from .engines.replica import EngineReplica
from .gateway.settings import LONGEST_DRAIN_S
from .ingress.gateway_controller import GatewayController
from .ingress.replica import GatewayReplica
from .logs import LogFormat
from .membership.draining import LONGEST_S
from .planning.model_checks import check_model
from .serve_policy import FollowDirectory
from .spec import REPLICA_CPUS, Fleet, FleetSpec, Reservations, load_spec
from .spec.serve_llm import application_args

ROOT = "gateway"  # name of the root deployment

# Serve replaces a replica that fails three health checks in a row, even if its machine is only cut off from the head
# for a while. With a timeout of 10 s, a partition of 20 s replaced every replica; now that takes a minute.
HEALTH_CHECK_PERIOD_S = 0.5
HEALTH_CHECK_TIMEOUT_S = 20.0
SHUTDOWN_S = 5.0
# Serve's own limits for a gateway are so high that the gateway's limits, which can change while it runs, apply first.
GATEWAY_SHUTDOWN_S = 2 * LONGEST_DRAIN_S + SHUTDOWN_S
MOST_REQUESTS = 1_000_000


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """Build the application. Raises `InvalidSpec` if the settings cannot work."""
    spec = load_spec(args)
    check_model(spec)
    plain, engine_args = spec.model_dump(mode="json", exclude_unset=True), spec.engine_args()
    reservations = Reservations(spec, ray.cluster_resources().get("GPU", 0.0))
    engines = [_engines(spec, role, engine_args, reservations) for role in spec.fleets.present]
    root = _gateways(spec) if spec.load_balancing is LoadBalancing.INTERNAL else _controller(spec)
    return root.bind(plain, engines)


def build_openai_app(serving_args: Any) -> serve.Application:
    """Build the application from the arguments of Ray Serve LLM's function of this name: see `spec/serve_llm.py`.

    Raises `InvalidSpec`.
    """
    return build_app(application_args(serving_args))


def _engines(spec: FleetSpec, role: Role, args: dict[str, Any], reservations: Reservations) -> serve.Application:
    """Bind the deployment of one fleet's engines."""
    fleet = spec.fleets.present[role]
    saving_s = 0.0 if fleet.kv_tiers is None else fleet.kv_tiers.save_s
    deployment = serve.deployment(
        name=role.value,
        **_size(fleet),
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        # The bundles include those of the workers: only the loss of its own machines ends a group.
        placement_group_bundles=reservations.bundles_of(role),
        placement_group_strategy="PACK",
        logging_config=_serves_log(spec),
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        max_surge_percent=fleet.max_surge_percent,
        graceful_shutdown_timeout_s=fleet.drain_timeout_s + LONGEST_S + SHUTDOWN_S + saving_s,
        graceful_shutdown_wait_loop_s=0.1,
    )(EngineReplica)
    return deployment.bind(args, role.value, reservations.bundle_of(role))


def _size(fleet: Fleet) -> dict[str, Any]:
    """Return Serve's options for the number of replicas.

    Serve adds no delays of its own: all of them are in Baton's policy, so that simulations of it hold.
    """
    if not fleet.is_scaled:
        return {"num_replicas": fleet.replicas}
    config = AutoscalingConfig(
        min_replicas=fleet.bounds.min_replicas,
        max_replicas=fleet.bounds.max_replicas,
        initial_replicas=fleet.first_replicas,
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=AutoscalingPolicy(policy_function=FollowDirectory),
    )
    return {"autoscaling_config": config}


def _serves_log(spec: FleetSpec) -> dict[str, str]:
    """Return the logging options with which Serve writes its own lines into a replica's log."""
    return {"encoding": "JSON" if spec.logging.format is LogFormat.JSON else "TEXT"}


def _gateways(spec: FleetSpec) -> serve.Deployment:
    gateway = spec.gateway
    return serve.deployment(
        name=ROOT,
        num_replicas=gateway.replicas,
        ray_actor_options={"num_cpus": gateway.num_cpus, "resources": gateway.resources},
        user_config={},
        max_ongoing_requests=MOST_REQUESTS,
        logging_config=_serves_log(spec),
        max_surge_percent=gateway.max_surge_percent,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=GATEWAY_SHUTDOWN_S,
        graceful_shutdown_wait_loop_s=0.1,
    )(GatewayReplica)


def _controller(spec: FleetSpec) -> serve.Deployment:
    return serve.deployment(
        name=ROOT,
        user_config={},
        ray_actor_options={"num_cpus": 0},
        logging_config=_serves_log(spec),
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=GATEWAY_SHUTDOWN_S,
        graceful_shutdown_wait_loop_s=0.1,
    )(GatewayController)
