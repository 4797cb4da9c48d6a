"""Every example of values renders objects that Kubernetes accepts and an application that starts."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path

import helm_python
import kubernetes_validate
import pytest
import yaml

from baton.cluster.contracts import LoadBalancing
from baton.cluster.spec import FleetSpec, Reservations, load_spec

from ...helpers.charts import CHART, EXAMPLES, HELM, example, rayservice_problems, render, values_of

KUBERNETES = "1.30"
OTHERS = ("RayService", "ServiceMonitor", "PodMonitor", "PrometheusRule")  # custom resources of operators
every_example = pytest.mark.parametrize("name", EXAMPLES)

# example: kind of pods: (how many, GPUs of each, gateways in each)
LAYOUT = {
    "cpu-demo": {"gateway": (1, 0, 1), "prefill": (1, 0, 0), "decode": (1, 0, 0)},
    "one-gpu": {"gateway": (2, 0, 1), "unified": (1, 1, 0)},
    "prefill-decode": {"gateway": (2, 0, 1), "engines": (1, 2, 0)},
    "tp8-node": {"gateway": (2, 0, 1), "unified": (1, 8, 0)},
    "wide-ep": {"unified": (2, 8, 1)},
    "hybrid": {"prefill": (1, 8, 0), "decode": (2, 8, 1)},
    "external": {"unified": (1, 8, 4)},
    "autoscaling": {"gateway": (3, 0, 1), "prefill": (1, 1, 0), "decode": (2, 1, 0)},
}


def spec_of(name: str) -> FleetSpec:
    return load_spec(example(name).application, needs_model=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [None, *EXAMPLES])
def test_helm_lint_has_no_complaints(name: str | None) -> None:
    report = helm_python.lint(CHART, values_of(name) if name else {}, strict=True)
    information = 1
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > information] == []


@pytest.mark.exhaustive
@every_example
def test_the_rayservice_fits_its_custom_resource_definition(name: str) -> None:
    (service,) = example(name).all("RayService").values()
    assert rayservice_problems(service) == []


def test_a_field_that_kuberay_does_not_know_would_be_found() -> None:
    (service,) = copy.deepcopy(example("cpu-demo").all("RayService")).values()
    pod = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    pod["containers"][0]["imagePolicy"] = "Always"
    pod["terminationGracePeriodSeconds"] = "30"
    found = "\n".join(rayservice_problems(service))
    assert "imagePolicy" in found
    assert "'30' is not of type 'integer'" in found


@every_example
def test_all_other_objects_fit_kubernetes(name: str) -> None:
    objects = [entry for entry in example(name).objects if entry["kind"] not in OTHERS]
    assert len(objects) >= 3
    for entry in objects:
        kubernetes_validate.validate(entry, KUBERNETES, strict=True)


@every_example
def test_the_number_of_pods_is_what_the_fleets_need(name: str) -> None:
    groups = example(name).groups
    assert {kind: (group.replicas, group.offers["GPU"], group.gateways) for kind, group in groups.items()} == LAYOUT[
        name
    ]


@every_example
def test_ray_finds_a_place_for_every_rank(name: str) -> None:
    """Pods have CPUs, GPUs and marker resources for all of their ranks, each with a control plane."""
    spec, groups = spec_of(name), example(name).groups.values()
    for role in spec.fleets.present:
        places = sum(group.spec["maxReplicas"] * group.offers.get(f"baton_{role}", 0) for group in groups)
        assert places >= spec.num_workers_of(role)
    for group in groups:
        taken: dict[str, float] = {}
        for role in spec.fleets.present:
            for resource, amount in Reservations(spec, cluster_gpus=0).bundles_of(role)[0].items():
                taken[resource] = taken.get(resource, 0) + amount * group.offers.get(f"baton_{role}", 0)
        assert [resource for resource, amount in taken.items() if amount > group.offers.get(resource, 0)] == []


@every_example
def test_pods_ask_kubernetes_for_the_gpus_that_they_offer_to_ray(name: str) -> None:
    for group in example(name).groups.values():
        assert group.container["resources"]["limits"].get("nvidia.com/gpu", 0) == group.offers["GPU"]


@every_example
def test_pods_have_the_ports_of_their_gateways(name: str) -> None:
    """Ports follow the placement of gateways: one in a pod, or one for each rank that leads a group."""
    spec = spec_of(name)
    for kind, group in example(name).groups.items():
        leaders = sum(
            group.offers.get(f"baton_{role}", 0) / spec.engine_config(role).tensor_parallel_size
            for role in spec.fleets.present
            if role.writes_answers
        )
        expected = {
            LoadBalancing.INTERNAL: group.offers.get("baton_gateway", 0),
            LoadBalancing.HYBRID: min(leaders, 1),
            LoadBalancing.EXTERNAL: leaders,
        }[spec.load_balancing]
        assert group.gateways == expected, kind
        ports = [port for port_name, port in group.ports.items() if port_name.startswith("serve")]
        assert ports == list(range(spec.gateway.port, spec.gateway.port + group.gateways))
        labels = group.spec["template"]["metadata"]["labels"]
        assert (labels.get("baton/gateway") == "true") == bool(group.gateways)


@pytest.mark.slow
def test_baton_check_accepts_every_application(tmp_path: Path) -> None:
    files = []
    for name in EXAMPLES:
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(example(name).service["serveConfigV2"])
    baton = Path(sys.executable).parent / "baton"
    done = subprocess.run([baton, "check", *files], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is fine") == len(EXAMPLES)


@every_example
def test_the_application_follows_the_values(name: str) -> None:
    given, application = values_of(name), example(name).application
    assert application["model"] == given["model"]
    assert application["engine"] == given["engine"]
    assert set(application["fleets"]) == set(given["fleets"])
    for role, fleet in given["fleets"].items():
        assert fleet.items() <= application["fleets"][role].items()


def test_whole_numbers_stay_whole() -> None:
    application = yaml.safe_load(example("cpu-demo").service["serveConfigV2"])["applications"][0]["args"]
    assert application["engine"]["kv_cache_memory_bytes"] == 268435456
    assert isinstance(application["engine"]["kv_cache_memory_bytes"], int)


def test_without_values_there_is_one_engine_with_the_demo_model() -> None:
    release = render({})
    assert list(release.groups) == ["gateway", "unified"]
    assert load_spec(release.application, needs_model=False).fleets.present.keys() == {"unified"}
    assert "serves model as RayService demo-baton" in release.notes


def test_the_download_job_stores_the_model_where_the_example_reads_it() -> None:
    job, values = yaml.safe_load((HELM / "fetch-model.yaml").read_text()), values_of("one-gpu")
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][-1] == values["model"]
    (pod_container,) = example("one-gpu").pods["unified"]["spec"]["containers"]
    (home,) = [each for each in pod_container["env"] if each["name"] == "HF_HOME"]
    assert home in container["env"]
    assert home["value"] == container["volumeMounts"][0]["mountPath"]
    claim = values["hub"]["cacheVolume"]["source"]["persistentVolumeClaim"]["claimName"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim


def test_the_image_has_the_ray_version_of_the_values() -> None:
    image, values = (HELM / "image/Dockerfile").read_text(), yaml.safe_load((CHART / "values.yaml").read_text())
    (version,) = re.findall(r"^ARG RAY_VERSION=(\S+)$", image, re.MULTILINE)
    assert version == values["rayVersion"]
    assert image.index("ARG RAY_VERSION") < image.index("ray[serve]==${RAY_VERSION}")
