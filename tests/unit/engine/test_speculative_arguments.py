"""`speculative_config` from a call, a file or the command line to the engine's core; and what refuses it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.cli.cli_common import engine_args_from
from baton.cluster.contracts import Role
from baton.cluster.planning.model_checks import check_model
from baton.cluster.spec import InvalidSpec, load_spec
from baton.engine import EngineConfig, InvalidEngineConfig
from baton.engine.core.speculation.config import SpeculativeConfig
from baton.engine.hf_config.errors import UnsupportedModel
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.models import load_config, make_model
from baton.engine.parallel.groups import ExpertSpread
from baton.engine.startup.weight_counts import weight_bytes_of_rank, weights_of_rank
from baton.engine.worker.expert_balance import spread_experts

from ...helpers.thread_groups import thread_groups
from ...helpers.tiny_shapes import DIFFERENCES, SHAPE

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
MTP = {"method": "mtp", "num_speculative_tokens": 2}
UNIFIED = {"unified": {"replicas": 1}}


def config(**args: Any) -> EngineConfig:
    return EngineConfig.from_args({"model": "folder", **args})


def test_a_mapping_an_object_and_the_command_line_say_the_same() -> None:
    made = config(speculative_config=NGRAM)
    assert made.speculative_config == SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    assert config(speculative_config=made.speculative_config) == made
    assert config(**engine_args_from(["--speculative-config", json.dumps(NGRAM)])) == made
    assert config(**engine_args_from([f"--speculative-config={json.dumps(NGRAM)}"])) == made
    assert config(speculative_config=None) == config()


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"method": "eagle"}, "speculative_config.method", "is 'eagle', which is EAGLE before its third"),
        ({**NGRAM, "modle": "x"}, "speculative_config.modle", "is unknown"),
        ({**NGRAM, "num_speculative_tokens": 99}, "speculative_config.num_speculative_tokens", "at most 15"),
        ({"num_speculative_tokens": 4}, "speculative_config.method", "is missing"),
        ("ngram", "speculative_config", "must be a mapping"),
    ],
)
def test_an_error_names_the_key_within_the_argument(given: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidEngineConfig, match=message) as caught:
        config(speculative_config=given)
    assert caught.value.field == field


def test_all_arguments_can_be_passed_on_to_another_process() -> None:
    for given in (NGRAM, {"method": "suffix", "suffix_decoding_max_spec_factor": 2}):
        made = config(speculative_config=given)
        assert EngineConfig.from_args(made.model_dump()) == made
        assert EngineConfig.from_args(json.loads(made.model_dump_json())) == made


def test_a_fleet_may_have_its_own_or_none() -> None:
    spec = load_spec(
        {
            "model": "configs/demo/model",
            "engine": {"speculative_config": NGRAM},
            "fleets": {
                "prefill": {"engine": {"speculative_config": None}},
                "decode": {"engine": {"speculative_config": {"method": "suffix"}}},
            },
        }
    )
    assert spec.engine_config(Role.PREFILL).speculative_config is None
    assert spec.engine_config(Role.DECODE).speculative_config == SpeculativeConfig(method="suffix")
    passed_on = load_spec(json.loads(json.dumps(spec.model_dump(mode="json", exclude_unset=True))))
    assert passed_on.engine_config(Role.DECODE) == spec.engine_config(Role.DECODE)
    with pytest.raises(InvalidSpec, match=r"speculative_config.method: is 'medusa', which needs trained heads"):
        load_spec(
            {"model": "configs/demo/model", "fleets": UNIFIED, "engine": {"speculative_config": {"method": "medusa"}}}
        )


@pytest.mark.parametrize(
    ("guesses", "name"), [(MTP, "its draft layer"), ({"model": "small", "num_speculative_tokens": 2}, "small")]
)
def test_what_guesses_on_the_device_does_so_in_all_fleets_or_in_none(guesses: dict[str, Any], name: str) -> None:
    alone = {"prefill": {"replicas": 1}, "decode": {"replicas": 1, "engine": {"speculative_config": guesses}}}
    with pytest.raises(InvalidSpec, match=f"drafts with no model for prefill and with {name} for decode"):
        load_spec({"model": "configs/demo/model", "fleets": alone})
    both = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}
    spec = load_spec({"model": "configs/demo/model", "fleets": both, "engine": {"speculative_config": guesses}})
    assert {spec.engine_config(role).kept_for_guesses for role in (Role.PREFILL, Role.DECODE)} == {name}


def read(folder: Path, kind: str, architecture: str, **keys: Any) -> ModelConfig:
    raw = {**SHAPE, **DIFFERENCES[kind], "architectures": [architecture], "model_type": kind, **keys}
    (folder / "config.json").write_text(json.dumps(raw))
    return load_config(folder, load_format="dummy")


def test_a_model_without_a_draft_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'mtp' is not supported for Qwen3ForCausalLM"):
        read(tmp_path, "qwen3", "Qwen3ForCausalLM").with_draft_layers()
    with pytest.raises(UnsupportedModel, match="needs draft layers, and there are none"):
        read(tmp_path, "deepseek_v3", "DeepseekV3ForCausalLM", num_nextn_predict_layers=0).with_draft_layers()


def test_a_draft_layer_is_one_more_layer_of_the_caches_and_weights(tmp_path: Path) -> None:
    plain = read(tmp_path, "deepseek_v3", "DeepseekV3ForCausalLM")
    drafting = plain.with_draft_layers()
    assert plain.identity == drafting.identity
    assert drafting.caches.only.layers == (*plain.caches.only.layers, plain.num_layers)
    assert drafting.caches.fingerprint != plain.caches.fingerprint, "their blocks do not fit each other"
    for model in (plain, drafting):
        counted = weights_of_rank(model, config())
        held = sum(slot.num_elements for slot in make_model(model).slots())
        assert counted.plain + counted.narrow == pytest.approx(held, rel=0.02)


def test_a_plan_of_an_application_is_checked_before_anything_starts(tmp_path: Path) -> None:
    plain, mixture = tmp_path / "plain", tmp_path / "mixture"
    for folder, kind, architecture in (
        (plain, "qwen3", "Qwen3ForCausalLM"),
        (mixture, "qwen3_moe", "Qwen3MoeForCausalLM"),
    ):
        folder.mkdir()
        read(folder, kind, architecture)

    def check(model: Path, speculation: dict[str, Any], **args: Any) -> None:
        args = {"speculative_config": speculation, "data_parallel_size": 2, "device": "cuda", **args}
        check_model(load_spec({"model": str(model), "fleets": UNIFIED, "engine": args}))

    with pytest.raises(InvalidSpec, match="'mtp' is not supported for Qwen3ForCausalLM"):
        check(plain, MTP)
    for speculation in (NGRAM, {"model": str(plain), "num_speculative_tokens": 2}):
        check(plain, speculation)
        check(mixture, speculation, enable_expert_parallel=True)


def test_the_experts_of_a_draft_model_are_divided_and_not_spread(tmp_path: Path) -> None:
    model = read(tmp_path, "qwen3_moe", "Qwen3MoeForCausalLM")
    both = dataclasses.replace(model, draft_model=model)
    spread = config(data_parallel_size=2, enable_expert_parallel=True)
    whole = weights_of_rank(model, config()).num_bytes(model, has_fp8=False)
    before = weight_bytes_of_rank(model, spread, has_fp8=False)
    assert weight_bytes_of_rank(both, spread, has_fp8=False) - before == whole
    groups = thread_groups(2, 2, ExpertSpread())[0]
    assert groups.of_draft_model.tp is groups.tp
    draft_model = make_model(model)
    draft_model.divide(groups.of_draft_model)
    assert not spread_experts(draft_model)
