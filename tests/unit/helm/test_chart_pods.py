"""Pods of the chart: probes, termination times, the security standard, disruption budgets, settings of each kind."""

from __future__ import annotations

import pytest

from baton.cluster.app import SHUTDOWN_S
from baton.cluster.membership.draining import LONGEST_S
from baton.cluster.spec import load_spec

from ...helpers.charts import Object, example, render, values_of
from .chart_parts import containers, every_example, rendered, selects


@every_example
def test_every_pod_replaces_kuberays_probes_of_serves_proxy(name: str) -> None:
    for kind, container in containers(example(name)):
        assert {"livenessProbe", "readinessProbe"} <= container.keys(), kind


@every_example
def test_a_pod_with_a_gateway_is_ready_when_the_gateway_can_serve(name: str) -> None:
    release = example(name)
    for kind, group in release.groups.items():
        path = group.container["readinessProbe"]["httpGet"]["path"]
        assert path == ("/health" if group.gateways == 1 else "/api/healthz"), kind


def drains_s(container: Object) -> int:
    """Return the time that Ray gives a terminating pod to drain, in seconds."""
    (seconds,) = (one["value"] for one in container["env"] if one["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")
    return int(seconds)


@every_example
def test_pods_with_gateways_live_until_open_answers_have_ended(name: str) -> None:
    release = example(name)
    gateway = load_spec(release.application, needs_model=False).gateway
    for group in release.groups.values():
        stays_s = group.spec["template"]["spec"]["terminationGracePeriodSeconds"]
        if group.gateways:
            command, seconds = group.container["lifecycle"]["preStop"]["exec"]["command"]
            assert (command, int(seconds) >= gateway.drain_s + gateway.drain_timeout_s) == ("sleep", True)
            stays_s -= int(seconds)
        else:
            assert "lifecycle" not in group.container
        assert stays_s > drains_s(group.container)


@pytest.mark.exhaustive
@pytest.mark.parametrize("timeout_s", [None, 5.0, 120.5])
@every_example
def test_pods_with_engines_live_until_the_engines_have_drained(name: str, timeout_s: float | None) -> None:
    roles = values_of(name)["fleets"]
    release = rendered(
        name, fleets={} if timeout_s is None else {role: {"drain_timeout_s": timeout_s} for role in roles}
    )
    fleets = load_spec(release.application, needs_model=False).fleets.present.items()
    of_engines = {kind: group for kind, group in release.groups.items() if kind != "gateway"}
    assert of_engines
    for kind, group in of_engines.items():
        longest_s = max(fleet.drain_timeout_s for role, fleet in fleets if kind in (role, "engines"))
        assert drains_s(group.container) >= longest_s + LONGEST_S + SHUTDOWN_S  # Serve's limit for the end of a group


@every_example
def test_pods_fit_the_restricted_standard_of_kubernetes(name: str) -> None:
    """Exceptions are only what the values themselves request."""
    release = example(name)
    volumes = {"emptyDir", "secret", "configMap", "persistentVolumeClaim"}
    own = {"IPC_LOCK"} if name in ("hybrid", "wide-ep") else set()
    asked = {"prefill-decode": {"hostPath"}, "wide-ep": {"nfs", "hostPath"}, "tp8-node": {"image"}}.get(name, set())
    deployments = [entry["spec"]["template"] for entry in release.all("Deployment").values()]
    for template in [*release.pods.values(), *deployments]:
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        kinds = {next(key for key in volume if key != "name") for volume in pod["volumes"]}
        assert kinds <= volumes | asked
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            assert set(context["capabilities"].get("add", [])) <= own
    autoscaler = release.cluster.get("autoscalerOptions")
    assert autoscaler is None or autoscaler["securityContext"]["allowPrivilegeEscalation"] is False


# ------------------------------------------------------------------------------------------------------- availability


def test_disruption_budgets_keep_all_but_one_of_several_pods() -> None:
    budgets = example("autoscaling").all("PodDisruptionBudget")
    assert {kind: budget["spec"]["minAvailable"] for kind, budget in budgets.items()} == {"gateway": 2, "decode": 1}
    kept = rendered("cpu-demo", pods={"decode": {"minAvailable": 1}, "head": {"minAvailable": 1}})
    assert set(kept.all("PodDisruptionBudget")) == {"decode", "head"}
    assert rendered("autoscaling", podDisruptionBudget={"enabled": False}).all("PodDisruptionBudget") == {}


@pytest.mark.parametrize("name", ["autoscaling", "hybrid", "wide-ep"])
def test_a_disruption_budget_selects_only_the_pods_of_its_kind(name: str) -> None:
    release = rendered(name, pods={"head": {"minAvailable": 1}})
    labels = {kind: pod["metadata"]["labels"] for kind, pod in release.pods.items()}
    for kind, deployment in release.all("Deployment").items():
        labels[kind] = deployment["spec"]["template"]["metadata"]["labels"]
    budgets = release.all("PodDisruptionBudget")
    assert len(budgets) >= 2
    for kind, budget in budgets.items():
        selector = budget["spec"]["selector"]["matchLabels"]
        assert [pod for pod, its in labels.items() if selects(selector, its)] == [kind]


def test_autoscaling_sets_the_ranges_of_kinds_and_a_token_for_the_head() -> None:
    release = example("autoscaling")
    assert release.cluster["enableInTreeAutoscaling"] is True
    ranges = {kind: (group.spec["minReplicas"], group.spec["maxReplicas"]) for kind, group in release.groups.items()}
    assert ranges == {"gateway": (3, 3), "prefill": (1, 4), "decode": (2, 8)}, "the ranges must be those of the fleets"
    wider = rendered("autoscaling", pods={"decode": {"minReplicas": 0, "maxReplicas": 9}}).groups["decode"].spec
    assert (wider["minReplicas"], wider["maxReplicas"]) == (0, 9)
    tokens = {kind: pod["spec"]["automountServiceAccountToken"] for kind, pod in release.pods.items()}
    assert tokens == {"head": True, "gateway": False, "prefill": False, "decode": False}


def test_rays_autoscaler_can_read_the_resources_of_pods() -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _get_custom_resources

    params = example("wide-ep").groups["unified"].spec["rayStartParams"]
    assert _get_custom_resources({}, params, "unified") == {"baton_unified": 8}


def test_autoscaling_targets_are_passed_to_the_application() -> None:
    application = example("autoscaling").application
    assert application["autoscaling"] == {"ttft_s": 1.0, "inter_token_s": 0.03}
    assert application["fleets"]["decode"]["max_replicas"] == 8
    assert "autoscaling" not in example("prefill-decode").application


def test_without_autoscaling_there_are_pods_for_the_largest_fleets() -> None:
    release = rendered("autoscaling", autoscaling={"enabled": False})
    assert {kind: group.replicas for kind, group in release.groups.items()} == {"gateway": 3, "prefill": 4, "decode": 8}
    assert "enableInTreeAutoscaling" not in release.cluster
    for group in release.groups.values():
        assert group.spec["minReplicas"] == group.spec["maxReplicas"] == group.replicas


def test_the_state_of_the_head_is_stored_in_redis() -> None:
    options = example("wide-ep").cluster["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis://redis.databases:6379"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "baton-redis", "key": "redis-password"}
    assert "redisUsername" not in options
    assert "gcsFaultToleranceOptions" not in example("cpu-demo").cluster


def test_the_head_has_no_resources_for_engines_and_gateways() -> None:
    params = example("cpu-demo").cluster["headGroupSpec"]["rayStartParams"]
    assert (params["num-cpus"], params["num-gpus"]) == ("0", "0")


# --------------------------------------------------------------------------------------------------------------- pods


def test_settings_of_a_kind_override_those_of_all_pods() -> None:
    release = rendered(
        "one-gpu",
        pods={
            "defaults": {
                "env": [{"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"}],
                "nodeSelector": {"pool": "cpu"},
                "tolerations": [{"key": "spot", "operator": "Exists"}],
            },
            "unified": {
                "nodeSelector": {"pool": "gpu"},
                "annotations": {"team": "serving"},
                "labels": {"tier": "gold"},
                "volumes": [{"name": "scratch", "emptyDir": {}}],
                "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                "runtimeClassName": "nvidia",
                "hostNetwork": True,
                "rayStartParams": {"object-store-memory": "200000000"},
            },
        },
    )
    gateway, unified = release.pods["gateway"], release.pods["unified"]
    assert (gateway["spec"]["nodeSelector"], unified["spec"]["nodeSelector"]) == ({"pool": "cpu"}, {"pool": "gpu"})
    assert gateway["spec"]["tolerations"] == unified["spec"]["tolerations"]
    assert unified["metadata"]["annotations"] == {"team": "serving"}
    assert unified["metadata"]["labels"]["tier"] == "gold"
    assert unified["spec"]["runtimeClassName"] == "nvidia"
    assert (unified["spec"]["hostNetwork"], unified["spec"]["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert {"name": "scratch", "emptyDir": {}} in unified["spec"]["volumes"]
    (container,) = unified["spec"]["containers"]
    assert {"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"} in container["env"]
    params = release.groups["unified"].spec["rayStartParams"]
    assert (params["object-store-memory"], params["num-gpus"]) == ("200000000", "1")


@every_example
def test_every_pod_has_the_model_and_the_cache(name: str) -> None:
    """The head pod needs the model, too: it builds the application, which reads config.json."""
    source = values_of(name).get("modelVolume", {}).get("source")
    for kind, pod in example(name).pods.items():
        volumes = {volume.pop("name"): volume for volume in map(dict, pod["spec"]["volumes"])}
        (container,) = pod["spec"]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert volumes.get("models") == source, kind
        assert mounts.keys() == volumes.keys()
        assert {"name": "TRITON_CACHE_DIR", "value": f"{mounts['cache']}/triton"} in container["env"]
        assert {"name": "HF_HOME", "value": mounts["hub"]} in container["env"]


def test_a_model_of_the_hub_has_its_token_mirror_and_revision() -> None:
    hub = {"existingSecret": "hugging-face", "endpoint": "https://mirror.example", "offline": True}
    release = rendered("one-gpu", hub=hub, revision="v1")
    assert (release.application["model"], release.application["revision"]) == ("Qwen/Qwen3-8B", "v1")
    for _, container in containers(release):
        given = {entry["name"]: entry for entry in container["env"]}
        assert given["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hugging-face", "key": "token"}}
        assert given["HF_ENDPOINT"]["value"] == "https://mirror.example"
        assert given["HF_HUB_OFFLINE"]["value"] == "1"
    for _, container in containers(example("one-gpu")):
        assert {"HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"}.isdisjoint(entry["name"] for entry in container["env"])


def test_fleets_share_pods_on_request() -> None:
    release = rendered("hybrid", layout="together", pods={"engines": {"replicas": 4}})
    engines = release.groups["engines"]
    assert engines.replicas == 4
    assert {name: engines.offers[name] for name in ("GPU", "baton_prefill", "baton_decode")} == {
        "GPU": 6,
        "baton_prefill": 2,
        "baton_decode": 4,
    }


def test_pods_of_ranks_that_share_gpus_request_whole_gpus() -> None:
    release = rendered("prefill-decode", fleets={"prefill": {"num_gpus": 0.5}, "decode": {"num_gpus": 0.5}})
    assert release.groups["engines"].offers["GPU"] == 1
    assert release.application["fleets"]["decode"]["num_gpus"] == 0.5


def test_names_stay_short_enough_for_what_kuberay_appends() -> None:
    release = render(values_of("wide-ep"), name="a" * 53)
    assert max(len(entry["metadata"]["name"]) for entry in release.objects) <= 63
    (service,) = release.all("RayService")
    assert len(service) <= 40


def test_the_notes_name_the_model_as_it_is_served() -> None:
    assert "serves baton-demo as RayService demo-baton" in example("cpu-demo").notes
    assert "serves Qwen/Qwen3-8B as RayService" in rendered("one-gpu", model_id="").notes
    assert "Ranks of unified share a model's layers across pods" in rendered("tp8-node", gpusPerNode=4).notes
