"""Applications that are described by the configuration of Ray Serve LLM."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from baton.cluster.contracts import Role
from baton.cluster.spec import InvalidSpec, load_spec
from baton.cluster.spec.serve_llm import application_args

DEMO = str(Path(__file__).parents[3] / "configs/demo/model")


def llm_config(**changes: Any) -> dict[str, Any]:
    return {"model_loading_config": {"model_id": "demo", "model_source": DEMO}, **changes}


def args_of(**changes: Any) -> dict[str, Any]:
    return application_args({"llm_configs": [llm_config(**changes)]})


def test_a_minimal_configuration_is_one_engine_of_the_model() -> None:
    spec = load_spec(args_of())
    assert (spec.served_model_id, spec.model) == ("demo", DEMO)
    assert list(spec.fleets.present) == [Role.UNIFIED]
    assert spec.fleets.present[Role.UNIFIED].replicas == 1


def test_each_part_becomes_the_equivalent_setting() -> None:
    args = args_of(
        accelerator_type="H200",
        engine_kwargs={"tensor_parallel_size": 2, "max_num_seqs": 32},
        placement_group_config={"bundles": [{"CPU": 2, "GPU": 1}] * 2, "strategy": "PACK"},
        deployment_config={
            "autoscaling_config": {"min_replicas": 1, "max_replicas": 4, "initial_replicas": 2, "upscale_delay_s": 9},
            "max_ongoing_requests": 100,
            "graceful_shutdown_timeout_s": 7,
        },
    )
    spec = load_spec(args)
    fleet = spec.fleets.present[Role.UNIFIED]
    assert spec.engine.model_dump(exclude_unset=True) == {"tensor_parallel_size": 2, "max_num_seqs": 32}
    assert fleet.resources == {"accelerator_type:H200": 0.001}
    assert (fleet.num_cpus, fleet.num_gpus, fleet.drain_timeout_s) == (2, 1, 7)
    assert (fleet.min_replicas, fleet.max_replicas, fleet.first_replicas) == (1, 4, 2)
    assert spec.autoscaling is not None
    assert spec.autoscaling.upscale_delay_s == 9
    assert spec.gateway.max_inflight_requests == 100


class LLMConfig(BaseModel):
    """A stand-in for Ray's class, which cannot be imported without vLLM: a pydantic model with defaults."""

    model_loading_config: dict[str, Any]
    engine_kwargs: dict[str, Any] = {}
    deployment_config: dict[str, Any] = {}
    llm_engine: str = "vLLM"
    runtime_env: dict[str, Any] | None = None


def test_an_object_is_read_with_the_fields_that_were_set() -> None:
    config = LLMConfig(
        model_loading_config={"model_id": "demo", "model_source": DEMO},
        engine_kwargs={"max_model_len": 512},
        deployment_config={"num_replicas": 3},
    )
    spec = load_spec(application_args({"llm_configs": [config], "ingress_deployment_config": {"num_replicas": 2}}))
    assert spec.engine.model_dump(exclude_unset=True) == {"max_model_len": 512}
    assert spec.fleets.present[Role.UNIFIED].replicas == 3
    assert spec.gateway.replicas == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"lora_config": {"dynamic_lora_loading_path": "s3://a"}},
            "llm_configs.0.lora_config: adapters are not served",
        ),
        ({"model_loading_config": {"model_source": {"bucket_uri": "s3://a"}}}, "must be a folder"),
        ({"engine_kwarg": {}}, "engine_kwargs"),
        ({"deployment_config": {"num_replicas": "auto"}}, "give a number, or autoscaling_config"),
        ({"placement_group_config": {"bundles": [{"GPU": 1}, {"CPU": 1}]}}, "all must be alike"),
        ({"deployment_config": 3}, "llm_configs.0.deployment_config: must be a mapping, not int"),
    ],
)
def test_unsupported_settings_that_would_change_the_service_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        args_of(**changes)
    assert said in str(refused.value)


def test_two_models_are_two_applications() -> None:
    with pytest.raises(InvalidSpec, match="an application serves one model"):
        application_args({"llm_configs": [llm_config(), llm_config()]})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"deployment_config": {"autoscaling_config": {"max_replicas": 2, "target_ongoing_requests": 8}}}, "target_on"),
        ({"deployment_config": {"health_check_period_s": 3}}, "health_check_period_s"),
        ({"experimental_configs": {"a": 1}}, "experimental_configs"),
        ({"llm_engine": "vLLM"}, "llm_engine"),
        ({"placement_group_config": {"bundles": [{"CPU": 1}], "strategy": "SPREAD"}}, "strategy"),
    ],
)
def test_settings_that_baton_decides_itself_are_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture, changes: dict[str, Any], named: str
) -> None:
    with caplog.at_level(logging.WARNING):
        args_of(**changes)
    assert named in caplog.text


def test_ingress_settings_apart_from_the_number_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        application_args({"llm_configs": [llm_config()], "ingress_deployment_config": {"max_ongoing_requests": 9}})
    assert "max_ongoing_requests" in caplog.text
