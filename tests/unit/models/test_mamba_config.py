"""Configs of hybrids with Mamba-2: the fields that are read, and options that are refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.engine.config import EngineConfig, InvalidEngineConfig
from baton.engine.hf_config.errors import InvalidModelConfig, ModelError, UnsupportedModel
from baton.engine.hf_config.mamba import ATTENTION, MAMBA, MLP, MOE
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.models import load_config
from baton.engine.startup.division import check_division

from ...helpers.tiny_shapes import DIFFERENCES, SHAPE

ARCHITECTURES = {
    "bamba": "BambaForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
}
NAMED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
GIVEN = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_n_heads": 32},
    "granitemoehybrid": {"layer_types": [MAMBA, ATTENTION] * 16},
}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ModelConfig]:
    """Return a function that reads a family's tiny config with some keys changed; None removes a key."""

    def run(kind: str, **changes: Any) -> ModelConfig:
        raw = {**SHAPE, **DIFFERENCES[kind], **changes, "architectures": [ARCHITECTURES[kind]]}
        return write(tmp_path, {key: value for key, value in raw.items() if value is not None})

    return run


def write(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return load_config(folder, load_format="dummy")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_keys_that_are_left_out_have_the_values_that_transformers_gives_them(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    whole = transformers.AutoConfig.for_model(kind, **GIVEN.get(kind, {})).to_dict()
    whole["architectures"] = [ARCHITECTURES[kind]]
    few = {key: whole[key] for key in (*NAMED, "architectures", *GIVEN.get(kind, {})) if key in whole}
    assert write(tmp_path, few).identity == write(tmp_path, whole).identity


def test_each_layer_of_nemotron_has_one_block(read: Callable[..., ModelConfig]) -> None:
    config = read("nemotron_h", layers_block_type=None, hybrid_override_pattern="MEM*-", num_hidden_layers=None)
    assert config.mamba is not None
    assert config.mamba.blocks == ((MAMBA,), (MOE,), (MAMBA,), (ATTENTION,), (MLP,))
    assert (config.num_layers, config.num_mlps) == (5, 1)
    assert config.moe is not None
    assert config.moe.sparse_layers == (False, True, False, False, False)
    older = read("nemotron_h", layers_block_type=["mamba", "moe", "mamba", "attention", "mlp"])
    assert older.identity == config.identity


def test_heads_of_nemotron_nano_2_are_served(read: Callable[..., ModelConfig]) -> None:
    config = read("nemotron_h", mamba_head_dim=80, mamba_num_heads=128, n_groups=8, ssm_state_size=128)
    assert config.mamba is not None
    assert (config.mamba.head_dim, config.mamba.width, config.mamba.group_width) == (80, 10_240, 1024)


def test_experts_of_nemotron_may_have_the_name_of_other_families(read: Callable[..., ModelConfig]) -> None:
    config = read("nemotron_h", n_routed_experts=None, num_local_experts=16)
    assert config.identity == read("nemotron_h", n_routed_experts=16).identity


def test_layers_of_falcon_have_attention_and_mamba_beside_it(read: Callable[..., ModelConfig]) -> None:
    config = read("falcon_h1")
    assert config.mamba is not None
    assert config.mamba.blocks == ((MAMBA, ATTENTION, MLP),) * 3
    assert [len(config.rules.cache(config, layer)) for layer in range(3)] == [2, 2, 2]


def test_granite_without_experts_has_an_mlp_of_the_shared_width(read: Callable[..., ModelConfig]) -> None:
    config = read("granitemoehybrid", num_local_experts=0)
    assert config.moe is None
    assert (config.intermediate_size, config.num_mlps) == (48, 3)
    assert read("granitemoehybrid").num_mlps == 0


def test_granite_with_attention_alone_keeps_no_states(read: Callable[..., ModelConfig]) -> None:
    """granite-4.0-micro is such a model, although its config has sizes of Mamba-2."""
    config = read("granitemoehybrid", layer_types=[ATTENTION] * 3, num_local_experts=0, mamba_d_head=40)
    assert not config.has_states
    assert len(config.caches.groups) == 1
    check_division(config, EngineConfig(model="m", tensor_parallel_size=2, disable_hybrid_kv_cache_manager=True))
    assert read("granitemoehybrid").has_states


@pytest.mark.parametrize("infinity", [math.inf, "Infinity", {"__float__": "Infinity"}])
def test_time_steps_may_have_no_upper_limit(infinity: object, read: Callable[..., ModelConfig]) -> None:
    config = read("bamba", time_step_limit=[0.25, infinity])
    assert config.mamba is not None
    assert config.mamba.time_step_limits == (0.25, math.inf)


def test_states_are_kept_in_float32_beside_a_tail_in_the_type_of_the_model(read: Callable[..., ModelConfig]) -> None:
    states = read("bamba", torch_dtype="bfloat16", mamba_n_groups=1).caches.groups[1].blocks
    tail, state = states.parts  # type: ignore[union-attr]
    assert (tail.shape, tail.dtype) == ((8 * 16 + 2 * 32, 3), "bfloat16")
    assert (state.shape, state.dtype) == ((8, 16, 32), "float32")


@pytest.mark.parametrize(
    ("kind", "changes", "error", "text"),
    [
        ("bamba", {"mamba_d_conv": 5}, UnsupportedModel, "mamba_d_conv 5 is not supported, only 2 to 4"),
        ("bamba", {"mamba_d_state": 24}, UnsupportedModel, "mamba_d_state 24 .* powers of two from 16 to 256"),
        ("bamba", {"mamba_d_head": 256}, UnsupportedModel, "mamba_d_head 256 .* multiples of 16 from 16 to 128"),
        ("bamba", {"mamba_d_head": 24}, UnsupportedModel, "mamba_d_head 24 .* multiples of 16 from 16 to 128"),
        ("bamba", {"mamba_n_groups": 3}, InvalidModelConfig, r"mamba_n_heads \(8\) must be a multiple"),
        ("bamba", {"attn_layer_indices": []}, UnsupportedModel, "without a layer of attention"),
        ("bamba", {"attn_layer_indices": [3]}, InvalidModelConfig, "layers from 0 to 2"),
        ("bamba", {"time_step_limit": [1.0, 0.5]}, InvalidModelConfig, "two numbers of 0 or more"),
        ("bamba", {"time_step_limit": 0.5}, InvalidModelConfig, "two numbers of 0 or more"),
        ("bamba", {"attn_rotary_emb": 16}, UnsupportedModel, "attn_rotary_emb 16 is not supported, only 8"),
        ("bamba", {"hidden_act": "gelu"}, UnsupportedModel, "hidden_act 'gelu'"),
        ("falcon_h1", {"mamba_d_ssm": 96}, InvalidModelConfig, r"mamba_n_heads \(8\) heads of .* mamba_d_ssm .* 96"),
        ("falcon_h1", {"mamba_d_ssm": None}, InvalidModelConfig, "are 128 wide, and mamba_d_ssm or mamba_expand say"),
        ("falcon_h1", {"mamba_d_head": "auto", "mamba_d_ssm": 130}, InvalidModelConfig, "are 128 wide"),
        ("falcon_h1", {"attention_bias": True}, UnsupportedModel, "attention_bias true"),
        ("falcon_h1", {"mlp_bias": True}, UnsupportedModel, "mlp_bias true"),
        ("falcon_h1", {"projectors_bias": True}, UnsupportedModel, "projectors_bias true"),
        ("falcon_h1", {"mamba_proj_bias": True}, UnsupportedModel, "mamba_proj_bias true"),
        ("falcon_h1", {"mamba_use_mlp": False}, UnsupportedModel, "mamba_use_mlp false"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, InvalidModelConfig, "ssm_multipliers' must be a list of 5 numbers"),
        ("falcon_h1", {"mlp_multipliers": [1, "2"]}, InvalidModelConfig, "mlp_multipliers' must be a list of 2"),
        ("granitemoehybrid", {"layer_types": ["sliding_attention"] * 3}, UnsupportedModel, "sliding_attention"),
        ("granitemoehybrid", {"layer_types": [ATTENTION]}, InvalidModelConfig, "names 1 layers"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, UnsupportedModel, "position_embedding_type 'alibi'"),
        ("granitemoehybrid", {"normalization_function": "layernorm"}, UnsupportedModel, "normalization_function"),
        ("granitemoehybrid", {"layer_types": ATTENTION}, InvalidModelConfig, "must be a list of names"),
        ("granitemoehybrid", {"layer_types": None}, UnsupportedModel, "without a layer of attention"),
        ("nemotron_h", {"mlp_bias": True}, UnsupportedModel, "mlp_bias true"),
        ("nemotron_h", {"attention_bias": True}, UnsupportedModel, "attention_bias true"),
        ("nemotron_h", {"residual_in_fp32": True}, UnsupportedModel, "residual_in_fp32 true"),
        ("nemotron_h", {"tie_word_embeddings": True}, UnsupportedModel, "tie_word_embeddings true"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, UnsupportedModel, "mlp_hidden_act 'silu'"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, UnsupportedModel, "mamba_hidden_act 'gelu'"),
        ("nemotron_h", {"moe_latent_size": 0}, InvalidModelConfig, "'moe_latent_size' must be at least 1, not 0"),
        ("nemotron_h", {"scoring_func": "softmax"}, UnsupportedModel, "scoring_func 'softmax' .*only 'sigmoid'"),
        ("nemotron_h", {"n_shared_experts": 2}, UnsupportedModel, "n_shared_experts 2 is not supported .*only 1"),
        ("nemotron_h", {"n_group": 8}, InvalidModelConfig, "groups are rated by their two best"),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "M*X"},
            UnsupportedModel,
            r"hybrid_override_pattern 'M\*X'",
        ),
    ],
)
def test_unsupported_options_are_refused_by_name(
    kind: str, changes: dict[str, Any], error: type[ModelError], text: str, read: Callable[..., ModelConfig]
) -> None:
    with pytest.raises(error, match=text):
        read(kind, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "ranks", "text"),
    [
        ("bamba", {"mamba_n_heads": 6, "mamba_d_head": 16}, 4, r"number of Mamba-2 heads \(6\)"),
        ("bamba", {"mamba_n_heads": 12, "mamba_n_groups": 3}, 2, "3 heads or groups of a state"),
        ("granitemoehybrid", {"num_local_experts": 0, "shared_intermediate_size": 45}, 2, "shared_intermediate_size"),
        ("nemotron_h", {"moe_shared_expert_intermediate_size": 45}, 2, "size of the shared experts"),
    ],
)
def test_sizes_that_do_not_divide_over_ranks_are_refused_by_name(
    kind: str, changes: dict[str, Any], ranks: int, text: str, read: Callable[..., ModelConfig]
) -> None:
    config = EngineConfig.from_args({"model": "m", "tensor_parallel_size": ranks})
    with pytest.raises(InvalidEngineConfig, match=text):
        check_division(read(kind, **changes), config)


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_may_be_more_than_groups(kind: str, ranks: int, read: Callable[..., ModelConfig]) -> None:
    groups = "n_groups" if kind == "nemotron_h" else "mamba_n_groups"
    check_division(read(kind, **{groups: 1}), EngineConfig.from_args({"model": "m", "tensor_parallel_size": ranks}))


def test_engines_that_hand_blocks_over_are_refused(read: Callable[..., ModelConfig]) -> None:
    args = {"model": "m", "disable_hybrid_kv_cache_manager": True}
    with pytest.raises(InvalidEngineConfig, match="recurrent states"):
        check_division(read("nemotron_h"), EngineConfig.from_args(args))
