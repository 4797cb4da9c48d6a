"""The chart as Helm renders it, and the schemas that its objects must fit.

`rayservice_v1.json.gz` is the schema against which the Kubernetes API checks a RayService: `spec.versions[v1].schema`
(less `status`) of ray-operator/config/crd/bases/ray.io_rayservices.yaml of github.com/ray-project/kuberay. The file
names no release (controller-gen v0.16.5); by its fields it is newer than 1.6. Its sha256:
0a8fc325e6e22b9231c1f282b309555e2ecf94227ca20a03df3d1d9a403907ab
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import yaml

from baton.cluster.spec.deployments import with_deployments

HELM = Path(__file__).parents[2] / "helm"
CHART = HELM / "baton"
EXAMPLES = {file.stem: file for file in sorted((HELM / "examples").glob("*.yaml"))}
CRD_SCHEMA = Path(__file__).parent / "rayservice_v1.json.gz"

Object = dict[str, Any]


def values_of(example: str) -> Object:
    return yaml.safe_load(EXAMPLES[example].read_text())


@functools.cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


@dataclass(frozen=True)
class Release:
    """Everything that `helm install demo` would create in the namespace `llm`."""

    objects: list[Object]
    notes: str

    def all(self, kind: str) -> dict[str, Object]:
        """Return the objects of a kind, by the part of their name after the release's name."""
        found = [entry for entry in self.objects if entry["kind"] == kind]
        return {entry["metadata"]["name"].removeprefix("demo-baton").lstrip("-"): entry for entry in found}

    @property
    def service(self) -> Object:
        (service,) = self.all("RayService").values()
        return service["spec"]

    @property
    def cluster(self) -> Object:
        return self.service["rayClusterConfig"]

    @property
    def application(self) -> Object:
        """Return the application in the RayService's Serve config: its `args`, with the changes of `deployments`."""
        (application,) = yaml.safe_load(self.service["serveConfigV2"])["applications"]
        return with_deployments(application["args"], application["deployments"])

    @property
    def groups(self) -> dict[str, Group]:
        return {spec["groupName"]: Group(spec) for spec in self.cluster["workerGroupSpecs"]}

    @property
    def pods(self) -> dict[str, Object]:
        """Return the pod template of every kind of pod."""
        head = {"head": self.cluster["headGroupSpec"]["template"]}
        return head | {name: group.spec["template"] for name, group in self.groups.items()}


@dataclass(frozen=True)
class Group:
    """A worker group of the Ray cluster."""

    spec: Object

    @property
    def replicas(self) -> int:
        return self.spec["replicas"]

    @property
    def container(self) -> Object:
        (container,) = self.spec["template"]["spec"]["containers"]
        return container

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def gateways(self) -> int:
        return sum(name.startswith("serve") for name in self.ports)

    @property
    def offers(self) -> dict[str, float]:
        """Return the resources that one pod offers to Ray, by Ray's names."""
        params = self.spec["rayStartParams"]
        quoted = params["resources"]
        assert quoted[0] == quoted[-1] == "'", "it goes through a shell"
        return {"CPU": float(params["num-cpus"]), "GPU": float(params["num-gpus"]), **json.loads(quoted[1:-1])}


def render(values: Object, name: str = "demo") -> Release:
    """Render the chart with these values. Raises `helm_python.HelmError` for values that the chart refuses."""
    chart().validate_schema(values)
    texts = chart().render(values, name=name, namespace="llm")
    objects, notes = [], ""
    for path, text in texts.items():
        if path.endswith("NOTES.txt"):
            notes = text
        else:
            objects += [entry for entry in yaml.safe_load_all(text) if entry]
    return Release(objects, notes)


@functools.cache
def example(name: str) -> Release:
    return render(values_of(name))


def merged(*parts: Mapping[str, Any]) -> Object:
    """Merge values at every depth; later ones override earlier ones."""
    result: Object = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both else value
    return result


@functools.cache
def rayservice_schema() -> Object:
    """Return the schema, made to refuse unknown fields, which Kubernetes would silently drop."""
    schema = json.loads(gzip.decompress(CRD_SCHEMA.read_bytes()))
    for part in _parts(schema):
        if "properties" in part and not part.get("x-kubernetes-preserve-unknown-fields"):
            part["additionalProperties"] = False
    return schema


def _parts(schema: Object) -> Iterator[Object]:
    yield schema
    for inner in schema.get("properties", {}).values():
        yield from _parts(inner)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _parts(schema[key])


def rayservice_problems(service: Object) -> list[str]:
    validator = jsonschema.Draft202012Validator(rayservice_schema())
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(service)]
