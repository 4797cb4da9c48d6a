"""The Serve application: `import_path: baton.cluster.app:build_app` in a Serve config file.

gateway ──┬── unified
          ├── prefill     one deployment a fleet, one replica a group of engines
          └── decode

Engines are bound to their own settings. What gateways take while they run comes to them as Serve's `user_config`, over
`args`: see `spec/deployments.py`.

The root is the gateways (`internal` load balancing), or the controller that keeps one on each node or beside each rank.
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
from .spec import REPLICA_CPUS, Fleet, FleetSpec, load_spec
from .spec.serve_llm import application_args

ROOT = "gateway"  # the name of the deployment

# Serve replaces a replica that fails three checks in a row, also where its machine is only cut off: with 10 s, a head
# that was cut off for 20 s replaced every replica. Now that takes a minute.
HEALTH_CHECK_PERIOD_S = 0.5
HEALTH_CHECK_TIMEOUT_S = 20.0
SHUTDOWN_S = 5.0
# Serve's bounds of a gateway, whose own limits hold, and may change while it runs.
GATEWAY_SHUTDOWN_S = 2 * LONGEST_DRAIN_S + SHUTDOWN_S
MOST_REQUESTS = 1_000_000


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """Build the application. Raises `InvalidSpec` for one that cannot work."""
    spec = load_spec(args)
    check_model(spec)
    plain, engine_args = spec.model_dump(mode="json", exclude_unset=True), spec.engine_args()
    gpus = ray.cluster_resources().get("GPU", 0.0)
    engines = [_engines(spec, role, engine_args, gpus) for role in spec.fleets.present]
    root = _gateways(spec) if spec.load_balancing is LoadBalancing.INTERNAL else _controller(spec)
    return root.bind(plain, engines)


def build_openai_app(serving_args: Any) -> serve.Application:
    """Build the application from what Ray Serve LLM's function of this name takes: see `spec/serve_llm.py`.

    Raises `InvalidSpec`.
    """
    return build_app(application_args(serving_args))


def _engines(spec: FleetSpec, role: Role, args: dict[str, Any], gpus: float) -> serve.Application:
    """Bind the deployment of one fleet's engines; `gpus`: how many the cluster has."""
    fleet = spec.fleets.present[role]
    saving_s = 0.0 if fleet.kv_tiers is None else fleet.kv_tiers.save_s
    deployment = serve.deployment(
        name=role.value,
        **_size(fleet),
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        placement_group_bundles=spec.bundles_of(
            role, gpus
        ),  # holds the workers, too: no other machine's loss ends the group
        placement_group_strategy="PACK",
        logging_config=_serves_log(spec),
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        max_surge_percent=fleet.max_surge_percent,
        graceful_shutdown_timeout_s=fleet.drain_timeout_s + LONGEST_S + SHUTDOWN_S + saving_s,
        graceful_shutdown_wait_loop_s=0.1,
    )(EngineReplica)
    return deployment.bind(args, role.value, spec.bundle_of(role, gpus))


def _size(fleet: Fleet) -> dict[str, Any]:
    """Return Serve's options for the number of replicas. All delays are our policy's, so that simulations hold."""
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
    """Return the format in which Serve writes its own lines into the log of a replica."""
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
