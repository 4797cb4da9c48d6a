"""The Serve application: `import_path: baton.cluster.app:build_app` in a Serve config file.

gateway (ingress) ──┬── unified
                    ├── prefill     one deployment a fleet, one replica an engine
                    └── decode
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from .contracts import Role
from .gateway_replica import GatewayReplica
from .replica import EngineReplica
from .spec import Fleet, FleetSpec, load_spec

APP_NAME = "baton"

# A dead worker fails three checks in a row before Serve acts on it.
HEALTH_CHECK_PERIOD_S = 0.5
HEALTH_CHECK_TIMEOUT_S = 10.0
SHUTDOWN_S = 5.0
REPLICA_CPUS = 0.1


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """Raises `InvalidSpec` for an application that cannot work."""
    spec = load_spec(args)
    plain = spec.model_dump(mode="json", exclude_unset=True)
    engines = [_engines(role, fleet, plain) for role, fleet in spec.fleets.present.items()]
    return _gateway(spec).bind(plain, engines)


def _engines(role: Role, fleet: Fleet, args: dict[str, Any]) -> serve.Application:
    deployment = serve.deployment(
        name=role.value,
        num_replicas=fleet.replicas,
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=SHUTDOWN_S,
        graceful_shutdown_wait_loop_s=0.1,
    )(EngineReplica)
    return deployment.bind(args, role.value)


def _gateway(spec: FleetSpec) -> serve.Deployment:
    gateway = spec.gateway
    return serve.deployment(
        name="gateway",
        num_replicas=gateway.replicas,
        ray_actor_options={"num_cpus": gateway.num_cpus, "resources": gateway.resources},
        max_ongoing_requests=gateway.max_inflight_requests,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=SHUTDOWN_S,
        graceful_shutdown_wait_loop_s=0.1,
    )(GatewayReplica)
