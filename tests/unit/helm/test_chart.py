"""What single values change, and what the chart refuses."""

from __future__ import annotations

import base64
import os
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from baton.cluster.app import SHUTDOWN_S
from baton.cluster.membership.draining import LONGEST_S
from baton.cluster.spec import load_spec

from ...helpers.charts import (
    CHART,
    EXAMPLES,
    HELM,
    Object,
    Release,
    example,
    merged,
    rayservice_problems,
    render,
    values_of,
)

CONFIGS = HELM.parent / "configs"
every_example = pytest.mark.parametrize("name", EXAMPLES)


def rendered(name: str, **changes: Any) -> Release:
    release = render(merged(values_of(name), changes))
    (service,) = release.all("RayService").values()
    assert rayservice_problems(service) == []
    return release


def containers(release: Release) -> Iterator[tuple[str, Object]]:
    for kind, pod in release.pods.items():
        (container,) = pod["spec"]["containers"]
        yield kind, container


def selects(selector: Object, labels: Object) -> bool:
    return selector.items() <= labels.items()


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"prot": 1}}, "prot"),
        ({"gateway": {"host": "127.0.0.1"}}, "/gateway/host"),
        ({"gateway": {"api_keys": ["two words"]}}, "/gateway/api_keys/0"),
        ({"engine": {"max_num_seq": 1}}, "max_num_seq"),
        ({"engine": {"max_num_seqs": "64"}}, "/engine/max_num_seqs"),
        ({"engine": {"model": "x"}}, "model"),
        ({"engine": {"tensor_parallel_size": 0}}, "/engine/tensor_parallel_size"),
        ({"fleets": {"decode": {"engine": {"data_parallel_size": 0}}}}, "/fleets/decode/engine/data_parallel_size"),
        ({"model": None}, "model"),
        ({"fleets": {"decode": {"engine": {"tp": 2}}}}, "tp"),
        ({"fleets": {"prefill": None}}, "prefill"),
        ({"fleets": {"decoder": {}}}, "decoder"),
        ({"transfer": {"lease": 1}}, "lease"),
        ({"load_balancing": "round-robin"}, "/load_balancing"),
        ({"pods": {"decode": {"cpu": 1}}}, "cpu"),
        ({"pods": {"workers": {}}}, "workers"),
        ({"autoscaling": {"min": 1}}, "min"),
        ({"monitoring": {"serviceMonitor": True}}, "/monitoring/serviceMonitor"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(changes: Object, said: str) -> None:
    with pytest.raises(helm_python.HelmError) as refusal:
        render(merged(values_of("cpu-demo"), changes))
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("hybrid", {"gateway": {"replicas": 2}}, "load_balancing is hybrid, so there is one a pod"),
        ("external", {"gateway": {"replicas": 2}}, "load_balancing is external, so there is one a rank"),
        ("external", {"balancer": {"enabled": False}}, "set balancer.enabled"),
        ("hybrid", {"pods": {"decode": {"ranksPerPod": 2}}}, "tensor_parallel_size is 4 and a pod has 2"),
        ("one-gpu", {"autoscaling": {"enabled": True}}, "changes nothing without a range"),
        ("autoscaling", {"pods": {"decode": {"maxReplicas": 1}}}, "needs 2 pods, minReplicas is 2 and maxReplicas 1"),
        ("wide-ep", {"gcsFaultTolerance": {"redisAddress": ""}}, "where is Redis?"),
        ("autoscaling", {"pods": {"decode": {"minAvailable": 3}}}, "pods.decode.minAvailable is 3 of 2 pods"),
        (
            "cpu-demo",
            {"pods": {"decode": {"maxReplicas": 4}}},
            "pods.decode: minReplicas and maxReplicas are for machines",
        ),
        (
            "hybrid",
            {"fleets": {"decode": {"min_replicas": 0, "max_replicas": 2}}},
            "decode.min_replicas is 0: load_balancing is",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_a_reason(name: str, changes: Object, said: str) -> None:
    with pytest.raises(helm_python.HelmError) as refusal:
        render(merged(values_of(name), changes))
    assert said in str(refusal.value)


def test_the_schema_of_values_is_the_one_that_the_code_gives() -> None:
    written = runpy.run_path(str(HELM / "values_schema.py"))["text"]()
    assert (CHART / "values.schema.json").read_text() == written, "run: python helm/values_schema.py"


def test_the_schema_has_every_value_that_has_a_default() -> None:
    properties = helm_python.Chart.load(CHART).schema["properties"]
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(properties) - set(defaults) == {"global"}


# --------------------------------------------------------------------------------------------------------------- keys


def test_keys_are_in_a_secret_and_nowhere_else() -> None:
    release = rendered("hybrid", gateway={"api_keys": ["sk-one", "sk-two"]}, apiKeys={"existingSecret": ""})
    secret = release.all("Secret")["api-keys"]
    assert base64.b64decode(secret["data"]["api_keys"]).decode() == "sk-one\nsk-two"
    others = [entry for entry in release.objects if entry["kind"] != "Secret"]
    assert "sk-one" not in yaml.safe_dump_all(others) + release.notes


@pytest.mark.parametrize("own", ["", "baton-keys"])
def test_gateways_read_their_keys_where_the_secret_is_mounted(own: str) -> None:
    keys = {} if own else {"api_keys": ["sk-one"]}
    release = rendered("one-gpu", gateway=keys, apiKeys={"existingSecret": own})
    assert bool(release.all("Secret")) == (not own)
    file = Path(load_spec(release.application, needs_model=False).gateway.api_keys_file)
    pod = release.pods["gateway"]["spec"]
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "api-keys")
    (mount,) = (mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "api-keys")
    assert volume["secret"]["secretName"] == (own or "demo-baton-api-keys")
    assert file == Path(mount["mountPath"]) / volume["secret"]["items"][0]["path"]


def test_without_keys_the_notes_say_that_everyone_may_call() -> None:
    assert "Everyone who reaches the gateways may use them" in example("cpu-demo").notes
    assert "Everyone" not in example("one-gpu").notes


@pytest.mark.parametrize(
    ("auth", "options"),
    [
        ({}, {"mode": "token"}),
        ({"existingSecret": "ray-token"}, {"mode": "token", "secretName": "ray-token"}),
        ({"enabled": False}, None),
    ],
)
def test_ray_asks_for_a_token_unless_told_otherwise(auth: Object, options: Object | None) -> None:
    assert rendered("cpu-demo", rayAuth=auth).cluster.get("authOptions") == options


# ------------------------------------------------------------------------------------------------------------- probes


@every_example
def test_no_pod_is_left_to_kuberays_probes_which_ask_for_serves_proxy(name: str) -> None:
    for kind, container in containers(example(name)):
        assert {"livenessProbe", "readinessProbe"} <= container.keys(), kind


@every_example
def test_who_gets_requests_is_ready_when_its_gateway_can_serve(name: str) -> None:
    release = example(name)
    for kind, group in release.groups.items():
        path = group.container["readinessProbe"]["httpGet"]["path"]
        assert path == ("/health" if group.gateways == 1 else "/api/healthz"), kind


def drains_s(container: Object) -> int:
    """How long Ray lets what is in a pod that is to end go elsewhere."""
    (seconds,) = (one["value"] for one in container["env"] if one["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")
    return int(seconds)


@every_example
def test_pods_with_gateways_stay_until_open_answers_have_ended(name: str) -> None:
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


@pytest.mark.parametrize("timeout_s", [None, 5.0, 120.5])
@every_example
def test_pods_with_engines_stay_until_these_have_drained(name: str, timeout_s: float | None) -> None:
    roles = values_of(name)["fleets"]
    release = rendered(
        name, fleets={} if timeout_s is None else {role: {"drain_timeout_s": timeout_s} for role in roles}
    )
    fleets = load_spec(release.application, needs_model=False).fleets.present.items()
    of_engines = {kind: group for kind, group in release.groups.items() if kind != "gateway"}
    assert of_engines
    for kind, group in of_engines.items():
        longest_s = max(fleet.drain_timeout_s for role, fleet in fleets if kind in (role, "engines"))
        assert drains_s(group.container) >= longest_s + LONGEST_S + SHUTDOWN_S  # what Serve gives a group to end


@every_example
def test_pods_fit_the_restricted_standard_of_kubernetes(name: str) -> None:
    """But for what the values themselves ask for."""
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


# ------------------------------------------------------------------------------------------------------------ traffic


@every_example
def test_clients_reach_gateways_or_the_balancer_and_nothing_else(name: str) -> None:
    release = example(name)
    balanced = "balancer" in release.all("Deployment")
    pods = {kind: pod["metadata"]["labels"] for kind, pod in release.pods.items()}
    ports = {kind: {port["name"] for port in container["ports"]} for kind, container in containers(release)}
    if balanced:
        template = release.all("Deployment")["balancer"]["spec"]["template"]
        pods["balancer"] = template["metadata"]["labels"]
        ports["balancer"] = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    with_gateways = {kind for kind, group in release.groups.items() if group.gateways}
    services = release.all("Service")
    for service, expected in (("", {"balancer"} if balanced else with_gateways), ("gateways", with_gateways)):
        selector = services[service]["spec"]["selector"]
        assert {kind for kind, labels in pods.items() if selects(selector, labels)} == expected
    (port,) = services[""]["spec"]["ports"]
    assert all(port["targetPort"] in ports[kind] for kind in ({"balancer"} if balanced else with_gateways))
    gateway_ports = {port["port"] for port in services["gateways"]["spec"]["ports"]}
    assert gateway_ports == {
        port for group in release.groups.values() for name, port in group.ports.items() if name.startswith("serve")
    }


def test_external_gateways_without_a_balancer_have_no_common_address() -> None:
    release = rendered("external", balancer={"enabled": False}, ingress={"enabled": False})
    assert list(release.all("Service")) == ["gateways"]
    assert "put one of your own in front of the headless Service" in release.notes


def balancer_config(release: Release) -> str:
    return release.all("ConfigMap")["balancer"]["data"]["haproxy.cfg"]


def directives(config: str) -> set[str]:
    lines = (line.partition(" #")[0].strip() for line in config.splitlines())
    return {line for line in lines if line and not line.startswith(("#", "server", "bind", "default-server"))}


@pytest.mark.parametrize("name", ["hybrid", "external", "wide-ep"])
def test_haproxy_takes_its_configuration(name: str, tmp_path: Path) -> None:
    if shutil.which("haproxy") is None and not os.environ.get("CI"):
        pytest.skip("haproxy is not installed")
    file = tmp_path / "haproxy.cfg"
    file.write_text(balancer_config(example(name)))
    done = subprocess.run(["haproxy", "-c", "-f", file], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_the_balancer_is_the_one_that_is_shipped_for_other_places() -> None:
    shipped = directives((CONFIGS / "load_balancer/haproxy.cfg").read_text())
    assert len(shipped) > 15
    assert shipped <= directives(balancer_config(example("hybrid")))


def test_the_balancer_has_room_for_the_gateways_of_two_clusters() -> None:
    config = balancer_config(example("external"))
    for port in range(8000, 8004):
        assert f" 2 demo-baton-gateways.llm.svc.cluster.local:{port}" in config


def test_a_network_policy_lets_in_what_is_needed() -> None:
    release = example("hybrid")
    (policy,) = release.all("NetworkPolicy").values()
    among, clients, operator, metrics = policy["spec"]["ingress"]
    assert "ports" not in among
    (pods,) = among["from"]
    assert all(selects(pods["podSelector"]["matchLabels"], pod["metadata"]["labels"]) for pod in release.pods.values())
    assert {port["port"] for port in clients["ports"]} == {8000, 9000}
    assert {port["port"] for port in operator["ports"]} == {8265, 52365}
    assert {port["port"] for port in metrics["ports"]} == {8000, 8080}
    assert all(len(rule["from"]) == 1 for rule in (clients, operator, metrics))


def test_a_network_policy_without_peers_lets_everyone_in() -> None:
    release = rendered("external", networkPolicy={"enabled": True})
    (policy,) = release.all("NetworkPolicy").values()
    assert ["from" in rule for rule in policy["spec"]["ingress"]] == [True, False, False, False]
    assert policy["spec"]["ingress"][1]["ports"][0] == {"port": 8000, "endPort": 8003}


# ------------------------------------------------------------------------------------------------------- availability


def test_disruption_budgets_keep_all_but_one_of_several_pods() -> None:
    budgets = example("autoscaling").all("PodDisruptionBudget")
    assert {kind: budget["spec"]["minAvailable"] for kind, budget in budgets.items()} == {"gateway": 2, "decode": 1}
    kept = rendered("cpu-demo", pods={"decode": {"minAvailable": 1}, "head": {"minAvailable": 1}})
    assert set(kept.all("PodDisruptionBudget")) == {"decode", "head"}
    assert rendered("autoscaling", podDisruptionBudget={"enabled": False}).all("PodDisruptionBudget") == {}


@pytest.mark.parametrize("name", ["autoscaling", "hybrid", "wide-ep"])
def test_a_disruption_budget_is_about_the_pods_of_its_kind_and_no_others(name: str) -> None:
    release = rendered(name, pods={"head": {"minAvailable": 1}})
    labels = {kind: pod["metadata"]["labels"] for kind, pod in release.pods.items()}
    for kind, deployment in release.all("Deployment").items():
        labels[kind] = deployment["spec"]["template"]["metadata"]["labels"]
    budgets = release.all("PodDisruptionBudget")
    assert len(budgets) >= 2
    for kind, budget in budgets.items():
        selector = budget["spec"]["selector"]["matchLabels"]
        assert [pod for pod, its in labels.items() if selects(selector, its)] == [kind]


def test_autoscaling_gives_kinds_their_ranges_and_the_head_a_token() -> None:
    release = example("autoscaling")
    assert release.cluster["enableInTreeAutoscaling"] is True
    ranges = {kind: (group.spec["minReplicas"], group.spec["maxReplicas"]) for kind, group in release.groups.items()}
    assert ranges == {"gateway": (3, 3), "prefill": (1, 4), "decode": (2, 8)}, "what the fleets may need"
    wider = rendered("autoscaling", pods={"decode": {"minReplicas": 0, "maxReplicas": 9}}).groups["decode"].spec
    assert (wider["minReplicas"], wider["maxReplicas"]) == (0, 9)
    tokens = {kind: pod["spec"]["automountServiceAccountToken"] for kind, pod in release.pods.items()}
    assert tokens == {"head": True, "gateway": False, "prefill": False, "decode": False}


def test_rays_autoscaler_reads_what_pods_offer() -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _get_custom_resources

    params = example("wide-ep").groups["unified"].spec["rayStartParams"]
    assert _get_custom_resources({}, params, "unified") == {"baton_unified": 8}


def test_the_applications_targets_reach_it_under_their_own_names() -> None:
    application = example("autoscaling").application
    assert application["autoscaling"] == {"ttft_s": 1.0, "inter_token_s": 0.03}
    assert application["fleets"]["decode"]["max_replicas"] == 8
    assert "autoscaling" not in example("prefill-decode").application


def test_without_autoscaling_pods_are_as_many_as_fleets_ever_need() -> None:
    release = rendered("autoscaling", autoscaling={"enabled": False})
    assert {kind: group.replicas for kind, group in release.groups.items()} == {"gateway": 3, "prefill": 4, "decode": 8}
    assert "enableInTreeAutoscaling" not in release.cluster
    for group in release.groups.values():
        assert group.spec["minReplicas"] == group.spec["maxReplicas"] == group.replicas


def test_the_heads_state_goes_to_redis() -> None:
    options = example("wide-ep").cluster["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis://redis.databases:6379"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "baton-redis", "key": "redis-password"}
    assert "redisUsername" not in options
    assert "gcsFaultToleranceOptions" not in example("cpu-demo").cluster


def test_nothing_that_serves_is_placed_on_the_head() -> None:
    params = example("cpu-demo").cluster["headGroupSpec"]["rayStartParams"]
    assert (params["num-cpus"], params["num-gpus"]) == ("0", "0")


# --------------------------------------------------------------------------------------------------------------- pods


def test_a_kinds_settings_are_over_those_of_all() -> None:
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
    """The head as well: it builds the application, which reads config.json."""
    source = values_of(name).get("modelVolume", {}).get("source")
    for kind, pod in example(name).pods.items():
        volumes = {volume.pop("name"): volume for volume in map(dict, pod["spec"]["volumes"])}
        (container,) = pod["spec"]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert volumes.get("models") == source, kind
        assert mounts.keys() == volumes.keys()
        assert {"name": "TRITON_CACHE_DIR", "value": f"{mounts['cache']}/triton"} in container["env"]
        assert {"name": "HF_HOME", "value": mounts["hub"]} in container["env"]


def test_a_name_of_the_hub_comes_with_its_token_mirror_and_revision() -> None:
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


def test_fleets_share_pods_where_asked_to() -> None:
    release = rendered("hybrid", layout="together", pods={"engines": {"replicas": 4}})
    engines = release.groups["engines"]
    assert engines.replicas == 4
    assert {name: engines.offers[name] for name in ("GPU", "baton_prefill", "baton_decode")} == {
        "GPU": 6,
        "baton_prefill": 2,
        "baton_decode": 4,
    }


def test_ranks_that_share_a_gpu_ask_for_whole_ones() -> None:
    release = rendered("prefill-decode", fleets={"prefill": {"num_gpus": 0.5}, "decode": {"num_gpus": 0.5}})
    assert release.groups["engines"].offers["GPU"] == 1
    assert release.application["fleets"]["decode"]["num_gpus"] == 0.5


def test_names_stay_short_enough_for_what_kuberay_appends() -> None:
    release = render(values_of("wide-ep"), name="a" * 53)
    assert max(len(entry["metadata"]["name"]) for entry in release.objects) <= 63
    (service,) = release.all("RayService")
    assert len(service) <= 40


def test_a_model_is_called_what_the_notes_say() -> None:
    assert "serves baton-demo as RayService demo-baton" in example("cpu-demo").notes
    assert "serves Qwen/Qwen3-8B as RayService" in rendered("one-gpu", model_id="").notes
    assert "Ranks of unified share a model's layers across pods" in rendered("tp8-node", gpusPerNode=4).notes
