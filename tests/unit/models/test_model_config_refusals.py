"""Configs that cannot be served are refused with the name of the key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.engine.hf_config.errors import (
    InvalidModelConfig,
    MaxModelLenTooLong,
    ModelError,
    UnsupportedArchitecture,
    UnsupportedModel,
)
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.models import load_config

from .published_configs import QWEN3_MOE


def test_a_max_model_len_beyond_the_models_positions_is_refused(read: Callable[..., ModelConfig]) -> None:
    assert read(given={"max_model_len": 300}).max_model_len == 300
    with pytest.raises(MaxModelLenTooLong, match=r"513.*512 positions"):
        read(given={"max_model_len": 513})
    with pytest.raises(InvalidModelConfig, match="at least 1"):
        read(given={"max_model_len": 0})


def test_an_unsupported_architecture_names_the_supported_ones(read: Callable[..., ModelConfig]) -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"OPTForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        read(architectures=["OPTForCausalLM"])
    with pytest.raises(UnsupportedArchitecture):
        read(architectures=None)


PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "ntk.*yarn"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type .'yarn'. is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        *(
            ({"architectures": [name], "rope_parameters": PROPORTIONAL}, f"'proportional' is not supported for {name}")
            for name in ("Qwen3_5ForCausalLM", "DeepseekV3ForCausalLM")
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": "awq"}, "'quantization_config': quant_method 'awq'"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"architectures": ["Qwen3_5MoeForCausalLM"], "mlp_only_layers": [0]}, "mlp_only_layers .0. .*only .."),
        ({"architectures": ["Qwen3_5MoeForCausalLM"], "decoder_sparse_step": 2}, "decoder_sparse_step 2 .*only 1"),
        ({**QWEN3_MOE, "scoring_func": "sigmoid"}, "scoring_func 'sigmoid' .*Qwen3MoeForCausalLM, only 'softmax'"),
        ({"architectures": ["Qwen3NextForCausalLM"], "attn_output_gate": False}, "attn_output_gate false .*only true"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported for Qwen3.*only null"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported for Qwen3.*only null"),
        ({"torch_dtype": "float64"}, "float64"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["linear_attention", "full_attention"]},
            "linear_attention",
        ),
    ],
)
def test_unsupported_options_are_refused_by_name(
    read: Callable[..., ModelConfig], keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(**keys)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"max_position_embeddings": None}, "lacks 'max_position_embeddings'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be from 1"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' must be from 1 to 10000"),
        ({"hidden_size": 2**70}, "'hidden_size' must be from 1 to"),
        ({"vocab_size": "100"}, "'vocab_size' must be an integer"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"architectures": ["LlamaForCausalLM"], "head_dim": None, "hidden_size": 66}, "without a head_dim"),
        ({"head_dim": 15}, "head_dim .15. must be even"),
        ({"rms_norm_eps": "small"}, "'rms_norm_eps' must be a number"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
        ({"eos_token_id": "</s>"}, "'eos_token_id'"),
        ({"rope_scaling": {"type": "linear"}}, "need 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'factor' must be a positive number"),
        ({"rope_scaling": "linear"}, "must be an object"),
        ({"rope_scaling": {"type": "longrope", "short_factor": 1.0}}, "'short_factor' must be a list of numbers"),
        (
            {"head_dim": 4, "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            "longrope must have 2 factors.* not 1",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "'factor' must be a positive number"),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": 2}, "'layer_types' must be a list"),
        ({"architectures": "Qwen3ForCausalLM"}, "'architectures' must be a list"),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"]}, "layer_types names 1"),
    ],
)
def test_a_broken_config_names_the_key(read: Callable[..., ModelConfig], keys: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidModelConfig, match=named):
        read(**keys)


def test_arguments_that_do_not_exist_are_refused(read: Callable[..., ModelConfig]) -> None:
    with pytest.raises(InvalidModelConfig, match=r"dtype.*float8.*bfloat16"):
        read(given={"dtype": "float8"})


def test_a_name_instead_of_a_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelConfig, match=r"local folder.*name on the Hub"):
        load_config("Qwen3-0.6B")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold an object"):
        load_config(tmp_path)
