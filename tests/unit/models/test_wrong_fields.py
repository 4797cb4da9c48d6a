"""An invalid field in a model's files is refused with the names of file and field, for any value."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine.hf_config.errors import ModelError
from baton.engine.models import load_config

from .small_config import SIZES

ABSENT = object()
WRONG: list[Any] = [
    *("x", 1.5, -3, 0, 2**70, float("nan"), True, False, None, ABSENT),
    *([], [1], ["x"], [[1]], [None], [-1], {}, {"a": 1}),
]
DENSE: dict[str, Any] = {
    **SIZES,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
}
EXPERTS: dict[str, Any] = {**DENSE, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False}
LATENTS: dict[str, Any] = {
    **EXPERTS,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rope_interleave": True,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 2,
    "topk_group": 1,
}
ROPES = {
    "yarn": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "truncate": True,
    },
    "llama3": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "linear": {"rope_type": "linear", "factor": 2.0},
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
            "input_activations": {"type": "float", "num_bits": 8},
        }
    },
    "ignore": ["lm_head"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {**DENSE, "architectures": ["Qwen3ForCausalLM"]},
    "experts": {
        **EXPERTS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    },
    "latents": {
        **LATENTS,
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
    },
    "corrected choice": {
        **LATENTS,
        "architectures": ["DeepseekV3ForCausalLM"],
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 1,
    },
    "sinks": {
        **EXPERTS,
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.7,
    },
    "scales": {
        **DENSE,
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": False,
    },
    "ropes by window": {
        **DENSE,
        "architectures": ["Gemma3ForCausalLM"],
        "layer_types": None,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10_000.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "experts beside MLPs": {
        **DENSE,
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {},
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "delta nets": {
        **DENSE,
        "architectures": ["OlmoHybridForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 192,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    **{f"rope {kind}": {**DENSE, "architectures": ["LlamaForCausalLM"], "rope_scaling": ROPES[kind]} for kind in ROPES},
    "fp8": {**DENSE, "architectures": ["LlamaForCausalLM"], "quantization_config": FP8},
    "compressed": {**DENSE, "architectures": ["LlamaForCausalLM"], "quantization_config": COMPRESSED},
}
GENERATION = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "eos_token_id": [2],
    "max_new_tokens": 5,
}


def paths_in(values: dict[str, Any], *before: str) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield *before, key
        if isinstance(value, dict):
            yield from paths_in(value, *before, key)


def with_wrong(values: dict[str, Any], path: tuple[str, ...], wrong: Any) -> dict[str, Any]:
    changed = copy.deepcopy(values)
    place = changed
    for key in path[:-1]:
        place = place[key]
    if wrong is ABSENT:
        del place[path[-1]]
    else:
        place[path[-1]] = wrong
    return changed


def refusal_of(folder: Path, file: str, values: dict[str, Any]) -> str | None:
    """Return the refusal, or None if the file is read. Errors other than `ModelError` propagate."""
    (folder / file).write_text(json.dumps(values))
    try:
        load_config(folder, load_format="dummy")
    except ModelError as error:
        return str(error)
    return None


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_wrong_field_of_a_config_is_named_with_its_file(tmp_path: Path, kind: str) -> None:
    config = CONFIGS[kind]
    assert refusal_of(tmp_path, "config.json", config) is None
    num_refused = 0
    for path in paths_in(config):
        for wrong in WRONG:
            refusal = refusal_of(tmp_path, "config.json", with_wrong(config, path, wrong))
            if refusal is not None:
                num_refused += 1
                assert "config.json" in refusal, f"{path} = {wrong!r}"
                is_free = path[-1] == "group_0"  # this key is a name that the file chooses, not a field
                assert is_free or path[-1] in refusal, f"{path} = {wrong!r}: {refusal}"
    assert num_refused > len(config)


def test_a_wrong_field_of_a_generation_config_is_named_with_its_file(tmp_path: Path) -> None:
    assert refusal_of(tmp_path, "config.json", CONFIGS["dense"]) is None
    for path in paths_in(GENERATION):
        for wrong in ("x", ["x"], [[1]], {"a": 1}, True):
            refusal = refusal_of(tmp_path, "generation_config.json", with_wrong(GENERATION, path, wrong))
            assert refusal is not None, f"{path} = {wrong!r}"
            assert "generation_config.json" in refusal
            assert path[-1] in refusal
