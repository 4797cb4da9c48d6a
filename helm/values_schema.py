"""Writes helm/baton/values.schema.json: what an application may say comes from the code, what pods may be is here.

python helm/values_schema.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.cluster.contracts import Role
from baton.cluster.spec import FleetSpec, GatewaySpec

Schema = dict[str, Any]

SCHEMA_FILE = Path(__file__).parent / "baton/values.schema.json"
PLACED_BY_THE_CHART = ("num_cpus", "resources", "api_keys_file")  # of a gateway
MOUNTED_BY_THE_CHART = "download_dir"  # of the application: `hub.cacheVolume`
NOT_SAID = ("title", "description", "default")  # values.yaml and the docs say it

TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 1}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
SECONDS: Schema = {"type": "integer", "minimum": 0}
QUANTITY: Schema = {"type": ["string", "integer"], "pattern": "^[0-9.]+([numkMGTPE]i?)?$"}
INTERVAL: Schema = {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
KUBERNETES: Schema = {"type": "object"}  # checked by Kubernetes
KUBERNETES_LIST: Schema = {"type": "array", "items": {"type": "object"}}
AMOUNTS: Schema = {"type": "object", "additionalProperties": QUANTITY}


def closed(properties: Schema, **more: Any) -> Schema:
    """An object without other keys."""
    return {"type": "object", "additionalProperties": False, "properties": properties, **more}


def choice(*values: str) -> Schema:
    return {"enum": list(values)}


def shared(name: str) -> Schema:
    """One of the `$defs`."""
    return {"$ref": f"#/$defs/{name}"}


RESOURCES = shared("resources")
VOLUME = closed({"source": KUBERNETES, "mountPath": NAME})
POD = {
    "labels": TEXTS,
    "annotations": TEXTS,
    "resources": RESOURCES,
    "sharedMemory": QUANTITY,
    "rayStartParams": TEXTS,
    "env": KUBERNETES_LIST,
    "envFrom": KUBERNETES_LIST,
    "volumes": KUBERNETES_LIST,
    "volumeMounts": KUBERNETES_LIST,
    "initContainers": KUBERNETES_LIST,
    "nodeSelector": TEXTS,
    "tolerations": KUBERNETES_LIST,
    "affinity": KUBERNETES,
    "topologySpreadConstraints": KUBERNETES_LIST,
    "priorityClassName": TEXT,
    "runtimeClassName": TEXT,
    "schedulerName": TEXT,
    "hostNetwork": FLAG,
    "podSecurityContext": KUBERNETES,
    "securityContext": KUBERNETES,
    "terminationGracePeriodSeconds": SECONDS,
}
KEPT = {"minAvailable": {"type": "integer", "minimum": 0}}
SCALED = {**KEPT, "minReplicas": {"type": "integer", "minimum": 0}, "maxReplicas": COUNT}


def values_schema() -> Schema:
    """Return what values the chart takes."""
    spec = _plain(FleetSpec.model_json_schema())
    application, kinds = spec["properties"], spec["$defs"]
    del application[MOUNTED_BY_THE_CHART]
    _for_pods(kinds)
    scaling = kinds.pop("AutoscalingSpec")["properties"]
    values = {**application, "model": NAME, **_pods(), **_access(), **_operations(scaling)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart baton; written by helm/values_schema.py",
        **closed(values, required=["model"]),
        "$defs": {
            "resources": closed({"requests": AMOUNTS, "limits": AMOUNTS, "claims": KUBERNETES_LIST}),
            "rankPods": closed({**POD, **SCALED, "ranksPerPod": COUNT}),
            **kinds,
        },
    }


def _for_pods(kinds: Schema) -> None:
    """Narrow the application's settings to those that a chart can keep."""
    gateway = kinds["GatewaySpec"]
    for name in (*GatewaySpec.refused, *PLACED_BY_THE_CHART):
        del gateway["properties"][name]
    gateway["required"] = ["port"]
    gateway["properties"] |= {
        "host": {"type": "string", "not": choice("127.0.0.1", "localhost", "::1")},  # no Service would reach it
        "api_keys": {"type": "array", "items": {"type": "string", "pattern": "^\\S+$"}},  # one a line
    }
    kinds["Fleets"] = closed(
        dict.fromkeys(Role, shared("Fleet")),  # none is null
        dependentRequired={Role.PREFILL: [Role.DECODE], Role.DECODE: [Role.PREFILL]},
    )


def _pods() -> Schema:
    return {
        "image": closed(
            {"repository": NAME, "tag": TEXT, "pullPolicy": choice("IfNotPresent", "Always", "Never")},
            required=["repository"],
        ),
        "pullSecrets": {"type": "array", "items": closed({"name": NAME}, required=["name"])},
        "rayVersion": NAME,
        "modelVolume": closed({**VOLUME["properties"], "subPath": TEXT}),
        "hub": closed({"cacheVolume": VOLUME, "existingSecret": TEXT, "key": NAME, "endpoint": TEXT, "offline": FLAG}),
        "cacheVolume": VOLUME,
        "gpuResource": NAME,
        "gpusPerNode": COUNT,
        "layout": choice("separate", "together"),
        "pods": closed(
            {
                "defaults": closed(POD),
                "head": closed({**POD, **KEPT}),
                "gateway": closed({**POD, **SCALED}),
                **dict.fromkeys(Role, shared("rankPods")),
                "engines": closed({**POD, **SCALED, "replicas": COUNT}),
            }
        ),
        "serviceAccount": closed({"create": FLAG, "name": TEXT, "annotations": TEXTS}),
    }


def _access() -> Schema:
    peers = {"type": "array", "items": KUBERNETES}
    return {
        "service": closed(
            {"type": choice("ClusterIP", "NodePort", "LoadBalancer"), "port": PORT, "annotations": TEXTS}
        ),
        "ingress": closed(
            {"enabled": FLAG, "className": TEXT, "annotations": TEXTS, "host": TEXT, "tlsSecret": TEXT},
        ),
        "balancer": closed(
            {
                "enabled": FLAG,
                "replicas": COUNT,
                "image": NAME,
                "clusterDomain": NAME,
                "port": PORT,
                "resources": RESOURCES,
                "nodeSelector": TEXTS,
                "tolerations": KUBERNETES_LIST,
                "affinity": KUBERNETES,
            }
        ),
        "apiKeys": closed({"existingSecret": TEXT, "key": {"type": "string", "pattern": "^[-._a-zA-Z0-9]+$"}}),
        "rayAuth": closed({"enabled": FLAG, "existingSecret": TEXT}),
        "networkPolicy": closed({"enabled": FLAG, "clients": peers, "operator": peers, "metrics": peers}),
    }


def _operations(scaling: Schema) -> Schema:
    return {
        "podDisruptionBudget": closed({"enabled": FLAG}),
        "gcsFaultTolerance": closed(
            {
                "enabled": FLAG,
                "redisAddress": TEXT,
                "externalStorageNamespace": TEXT,
                "existingSecret": TEXT,
                "usernameKey": TEXT,
                "passwordKey": NAME,
            }
        ),
        "autoscaling": closed(
            {
                "enabled": FLAG,
                "version": choice("v1", "v2"),
                "upscalingMode": choice("Default", "Aggressive", "Conservative"),
                "idleTimeoutSeconds": SECONDS,
                "resources": RESOURCES,
                **scaling,
            }
        ),
        "upgradeStrategy": choice("NewCluster", "None"),
        "monitoring": closed(
            {
                "labels": TEXTS,
                "serviceMonitor": closed({"enabled": FLAG, "interval": INTERVAL}),
                "rayPodMonitor": closed({"enabled": FLAG, "interval": INTERVAL}),
                "prometheusRule": closed({"enabled": FLAG}),
                "dashboard": closed({"enabled": FLAG, "label": NAME, "labelValue": TEXT, "folder": TEXT}),
            }
        ),
        "nameOverride": TEXT,
        "fullnameOverride": TEXT,
        "commonLabels": TEXTS,
        "global": KUBERNETES,  # Helm hands it to every chart
    }


def _plain(schema: Any) -> Any:
    """Names and types alone."""
    if isinstance(schema, list):
        return [_plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _plain(value) for key, value in schema.items() if key not in (*NOT_SAID, "properties")}
    if "properties" in schema:  # names there may be any word
        plain["properties"] = {name: _plain(value) for name, value in schema["properties"].items()}
    return plain


def text() -> str:
    return json.dumps(values_schema(), indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(text())
