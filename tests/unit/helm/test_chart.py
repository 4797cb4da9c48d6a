"""The effect of single values on the chart's output, and the chart's refusals of wrong values."""

from __future__ import annotations

import base64
import os
import runpy
import shutil
import subprocess
from pathlib import Path

import helm_python
import pytest
import yaml

from baton.cluster.spec import load_spec

from ...helpers.charts import CHART, HELM, Object, Release, example, merged, render, values_of
from .chart_parts import containers, every_example, rendered, selects

CONFIGS = HELM.parent / "configs"


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
def test_invalid_values_are_refused_by_name(changes: Object, said: str) -> None:
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


def test_the_schema_of_values_is_the_generated_one() -> None:
    written = runpy.run_path(str(HELM / "values_schema.py"))["text"]()
    assert (CHART / "values.schema.json").read_text() == written, "run: python helm/values_schema.py"


def test_the_schema_has_every_value_with_a_default() -> None:
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


def test_without_keys_the_notes_warn_that_every_client_may_call() -> None:
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
def test_ray_requires_a_token_by_default(auth: Object, options: Object | None) -> None:
    assert rendered("cpu-demo", rayAuth=auth).cluster.get("authOptions") == options


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
def test_haproxy_accepts_its_configuration(name: str, tmp_path: Path) -> None:
    if shutil.which("haproxy") is None and not os.environ.get("CI"):
        pytest.skip("haproxy is not installed")
    file = tmp_path / "haproxy.cfg"
    file.write_text(balancer_config(example(name)))
    done = subprocess.run(["haproxy", "-c", "-f", file], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_the_balancers_config_includes_the_shipped_haproxy_config() -> None:
    shipped = directives((CONFIGS / "load_balancer/haproxy.cfg").read_text())
    assert len(shipped) > 15
    assert shipped <= directives(balancer_config(example("hybrid")))


def test_the_balancer_has_server_slots_for_the_gateways_of_two_clusters() -> None:
    config = balancer_config(example("external"))
    for port in range(8000, 8004):
        assert f" 2 demo-baton-gateways.llm.svc.cluster.local:{port}" in config


def test_a_network_policy_allows_the_needed_traffic() -> None:
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


def test_a_network_policy_without_peers_allows_every_client() -> None:
    release = rendered("external", networkPolicy={"enabled": True})
    (policy,) = release.all("NetworkPolicy").values()
    assert ["from" in rule for rule in policy["spec"]["ingress"]] == [True, False, False, False]
    assert policy["spec"]["ingress"][1]["ports"][0] == {"port": 8000, "endPort": 8003}
