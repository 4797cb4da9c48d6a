"""Applications described for Ray Serve LLM: `llm_configs`, translated into Baton's arguments.

    serve.run(build_openai_app({"llm_configs": [{
        "model_loading_config": {"model_id": "qwen", "model_source": "Qwen/Qwen3-8B"},
        "accelerator_type": "H200",
        "engine_kwargs": {"tensor_parallel_size": 2},
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}},
    }]}))

One model makes one application. Settings without a meaning here that change no answer are ignored with a warning;
settings that would change what is served are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from baton.engine.strict_model import hint

from .parts import InvalidSpec
from .reservations import SMALLEST_AMOUNT

logger = logging.getLogger(__name__)
ONE_MODEL = "an application serves one model: deploy one for each, with ports of their own"
REFUSED = {
    "lora_config": "adapters are not served: merge them into the weights",
    "runtime_env": "Baton is installed on every node; give environment variables to `ray start` there",
    "callback_config": "no code of callers runs while engines start",
    "accelerator_config": "give accelerator_type, and num_gpus in the bundles of placement_group_config",
}
CONFIG_KEYS = (
    "model_loading_config",
    "llm_engine",
    "engine_kwargs",
    "accelerator_type",
    "placement_group_config",
    "deployment_config",
    "log_engine_metrics",
    "experimental_configs",
)
WITHOUT_EFFECT = {"llm_engine", "log_engine_metrics", "experimental_configs"}  # ignored keys of an `llm_config`
# Deployment options that are passed to Serve there, but that Baton sets by itself.
DECIDED_HERE = (
    "name",
    "ray_actor_options",
    "max_queued_requests",
    "health_check_period_s",
    "health_check_timeout_s",
    "graceful_shutdown_wait_loop_s",
    "logging_config",
    "request_router_config",
)
BOUNDS = ("min_replicas", "max_replicas")
DELAYS = ("upscale_delay_s", "downscale_delay_s", "downscale_to_zero_delay_s", "look_back_period_s")
ONE_WAY_IN = "requests come in through Baton's gateways: see `gateway` in docs/reference/settings.md"


def application_args(serving_args: Any) -> dict[str, Any]:
    """Return arguments for `build_app` that serve the same as `LLMServingArgs`, given as a mapping or an object.

    Raises `InvalidSpec`.
    """
    given = _plain(serving_args, "llm_configs")
    _check_keys("", given, ("llm_configs", "ingress_deployment_config"), {"ingress_cls_config": ONE_WAY_IN})
    configs = given.get("llm_configs")
    if not isinstance(configs, Sequence) or isinstance(configs, str) or len(configs) != 1:
        raise InvalidSpec(f"llm_configs: must be a list of one configuration; {ONE_MODEL}")
    args = _application(_plain(configs[0], "llm_configs.0"))
    ingress = _mapping(given, "ingress_deployment_config", "")
    _warn("ingress_deployment_config", ingress.keys() - {"num_replicas"})
    if ingress.get("num_replicas") is not None:
        args.setdefault("gateway", {})["replicas"] = ingress["num_replicas"]
    return args


def _application(config: dict[str, Any]) -> dict[str, Any]:
    where = "llm_configs.0"
    _check_keys(where, config, CONFIG_KEYS, REFUSED)
    _warn(where, config.keys() & WITHOUT_EFFECT)
    loading = _mapping(config, "model_loading_config", where)
    _check_keys(f"{where}.model_loading_config", loading, ("model_id", "model_source"), {})
    source = loading.get("model_source") or loading.get("model_id")
    if not isinstance(source, str):
        raise InvalidSpec(f"{where}.model_loading_config.model_source: must be a folder, or a name of the Hub")
    fleet = _workers(config, where)
    args: dict[str, Any] = {"model": source, "engine": dict(_mapping(config, "engine_kwargs", where))}
    if loading.get("model_id"):
        args["model_id"] = loading["model_id"]
    deployment = _mapping(config, "deployment_config", where)
    known = ("num_replicas", "autoscaling_config", "max_ongoing_requests", "graceful_shutdown_timeout_s", *DECIDED_HERE)
    _check_keys(f"{where}.deployment_config", deployment, known, {"user_config": "give the settings themselves"})
    _warn(f"{where}.deployment_config", deployment.keys() & set(DECIDED_HERE))
    if "max_ongoing_requests" in deployment:
        args["gateway"] = {"max_inflight_requests": deployment["max_ongoing_requests"]}
    if "graceful_shutdown_timeout_s" in deployment:
        fleet["drain_timeout_s"] = deployment["graceful_shutdown_timeout_s"]
    scaling = deployment.get("autoscaling_config")
    if scaling is not None:
        args["autoscaling"] = _scale(_plain(scaling, f"{where}.deployment_config.autoscaling_config"), fleet)
    elif deployment.get("num_replicas") == "auto":
        raise InvalidSpec(f"{where}.deployment_config.num_replicas: give a number, or autoscaling_config")
    elif "num_replicas" in deployment:
        fleet["replicas"] = deployment["num_replicas"]
    return args | {"fleets": {"unified": fleet}}


def _scale(scaling: dict[str, Any], fleet: dict[str, Any]) -> dict[str, Any]:
    """Write the fleet's bounds into `fleet`; return the delays."""
    for bound in BOUNDS:
        fleet[bound] = scaling.get(bound, 1)
    if scaling.get("initial_replicas") is not None:
        fleet["replicas"] = scaling["initial_replicas"]
    # The number of groups follows latency targets instead (docs/operate/scaling.md).
    _warn("autoscaling_config", scaling.keys() - {*DELAYS, *BOUNDS, "initial_replicas"})
    return {name: scaling[name] for name in DELAYS if scaling.get(name) is not None}


def _workers(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the resources that one worker reserves: the accelerator's marker, and those of the placement bundles."""
    resources: dict[str, float] = {}
    if config.get("accelerator_type"):
        # A marker: its amount is too small to limit anything.
        resources[f"accelerator_type:{config['accelerator_type']}"] = SMALLEST_AMOUNT
    fleet: dict[str, Any] = {"resources": resources} if resources else {}
    placement = _mapping(config, "placement_group_config", where)
    _warn(f"{where}.placement_group_config", placement.keys() - {"bundles"})
    bundles = placement.get("bundles", [])
    distinct = {tuple(sorted(bundle.items())) for bundle in bundles}
    if len(distinct) > 1:
        raise InvalidSpec(f"{where}.placement_group_config.bundles: all must be alike: each is one rank's")
    for name, amount in next(iter(distinct), ()):
        if name in ("CPU", "GPU"):
            fleet[f"num_{name.lower()}s"] = amount
        else:
            fleet["resources"] = fleet.get("resources", {}) | {name: amount}
    return fleet


def _plain(value: Any, where: str) -> dict[str, Any]:
    """Return the mapping, or the explicitly set fields of a pydantic model."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json", exclude_unset=True)
    if not isinstance(value, Mapping):
        raise InvalidSpec(f"{where}: must be a mapping, not {type(value).__name__}")
    return dict(value)


def _mapping(parent: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = parent.get(key)
    return {} if value is None else _plain(value, f"{where}.{key}".lstrip("."))


def _check_keys(where: str, given: Mapping[str, Any], known: Sequence[str], refused: Mapping[str, str]) -> None:
    for key, value in given.items():
        at = f"{where}.{key}".lstrip(".")
        if key in refused:
            if value:
                raise InvalidSpec(f"{at}: {refused[key]}")
        elif key not in known:
            raise InvalidSpec(f"{at}: is unknown; {hint(key, list(known))}")


def _warn(where: str, ignored: set[str]) -> None:
    if ignored:
        logger.warning("%s: %s: decided by Baton itself, and ignored", where, ", ".join(sorted(ignored)))
