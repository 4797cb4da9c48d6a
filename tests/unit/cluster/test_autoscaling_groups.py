"""The choice of the groups that leave a fleet when it shrinks, and the sizes that Serve gets."""

from __future__ import annotations

import msgspec
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingContext

from baton.cluster.autoscaling.load_samples import FIRST_TOKEN_S, GatewayLoad
from baton.cluster.autoscaling.scaler import FleetTarget, Scaler, scaler_for
from baton.cluster.contracts import Bounds, EngineGroup, EnginePulse
from baton.cluster.serve_policy import target_replicas

from .engine_groups import group_of
from .scaling_samples import UNIFIED, D, P, U


def groups_with(live: dict[str, int], scaler: Scaler) -> list[EngineGroup]:
    groups = [group_of(name, size=1) for name in live]
    for group in groups:
        scaler.update_group(group, [EnginePulse(0.0, live[group.group_id], 0, 0)])
    return groups


def test_the_groups_with_the_fewest_requests_leave_first() -> None:
    scaler = Scaler(UNIFIED)
    scaler.start_from({U: 3})
    orders: dict[str, bool] = {}
    for second in range(6):
        groups = groups_with({"a": 5, "b": 1, "c": 2}, scaler)
        orders |= scaler.update(float(second), [], groups)
    assert orders == {"b": True, "c": True}
    wanted = scaler.wanted(U)
    assert wanted is not None
    assert (wanted.replicas, wanted.leaving) == (1, ["b", "c"])


def test_a_leaving_group_is_asked_to_stay_before_a_new_one_is_started() -> None:
    scaler = Scaler(msgspec.structs.replace(UNIFIED, fleets={U: Bounds(1, 2)}))
    scaler.start_from({U: 2})
    for second in range(6):
        scaler.update(float(second), [], groups_with({"a": 5, "b": 1}, scaler))
    wanted = scaler.wanted(U)
    assert wanted is not None
    assert wanted.leaving == ["b"]
    orders = {}
    first = [0.0] * (len(FIRST_TOKEN_S) + 1)
    for second in range(6, 16):  # every first token misses its target
        first[-1] += 20
        load = GatewayLoad(requests=20 * second, first_token=tuple(first), inflight=20)
        scaler.update_gateway("g", load)
        orders |= scaler.update(float(second), ["g"], groups_with({"a": 20, "b": 1}, scaler))
    assert orders == {"b": False}
    wanted = scaler.wanted(U)
    assert wanted is not None
    assert (wanted.replicas, wanted.leaving) == (2, [])


def test_beside_a_fleet_of_fixed_size_the_other_follows_its_load() -> None:
    scaler = Scaler(msgspec.structs.replace(UNIFIED, fleets={P: Bounds(2, 2), D: Bounds(0, 2)}))
    scaler.start_from({D: 0})
    scaler.update_gateway("g", GatewayLoad(requests=1, inflight=1, unplaced=1))
    scaler.update(0.0, ["g"], [])
    assert [each.replicas for role in (P, D) if (each := scaler.wanted(role))] == [2, 1]


def test_there_is_no_target_before_serve_has_reported_a_fleet() -> None:
    assert Scaler(UNIFIED).wanted(U) is None


def test_serves_target_counts_the_leaving_groups_that_still_run() -> None:
    """If the target left out a leaving group, Serve would stop another one as well."""
    wanted = FleetTarget(replicas=1, leaving=["decode-b"])

    def context(*running: str) -> AutoscalingContext:
        return AutoscalingContext(
            deployment_id=DeploymentID("decode", "app"),
            deployment_name="decode",
            app_name="app",
            current_num_replicas=len(running),
            target_num_replicas=2,
            running_replicas=[ReplicaID(name, DeploymentID("decode", "app")) for name in running],
            total_num_requests=0,
            total_queued_requests=0,
            aggregated_metrics={},
            raw_metrics={},
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=2,
            policy_state={},
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=None,
            config=None,
        )

    assert target_replicas(wanted, context("a", "b")) == 2
    assert target_replicas(wanted, context("a")) == 1


def test_new_targets_take_effect_at_once_and_keep_decisions_and_measurements() -> None:
    scaler = scaler_for(UNIFIED, None)
    assert scaler is not None
    scaler.start_from({U: 2})
    targets = msgspec.structs.replace(UNIFIED, ttft_s=UNIFIED.ttft_s / 2)
    assert scaler_for(targets, scaler) is scaler
    assert scaler.plan is targets
    assert scaler.wanted(U) == FleetTarget(2, [])
    bounds = scaler_for(msgspec.structs.replace(targets, fleets={U: Bounds(1, 9)}), scaler)
    assert bounds is not scaler, "other bounds need a new scaler"
    assert scaler_for(None, scaler) is None
