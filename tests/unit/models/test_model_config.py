"""What a folder says about its model: read without torch or transformers, refused by name where it cannot be served."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.engine.core.layout import CacheKind
from baton.engine.hf_config.attention import LatentShape
from baton.engine.hf_config.errors import (
    InvalidModelConfig,
    MaxModelLenTooLong,
    ModelError,
    UnsupportedArchitecture,
    UnsupportedModel,
)
from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.hf_config.model_config import ModelConfig, Scales
from baton.engine.hf_config.rope import LinearRope, Llama3Rope, Rope, YarnRope
from baton.engine.models import load_config

from .small_config import SIZES

PLAIN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    **SIZES,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ModelConfig]:
    """Writes a config.json of PLAIN with changes (None removes a key) and reads it."""

    def make(
        generation: dict[str, Any] | None = None, given: dict[str, Any] | None = None, **changes: Any
    ) -> ModelConfig:
        keys = {key: value for key, value in {**PLAIN, **changes}.items() if key not in changes or value is not None}
        (tmp_path / "config.json").write_text(json.dumps(keys))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_config(tmp_path, load_format="dummy", **(given or {}))

    return make


def test_sizes_are_read(read: Callable[..., ModelConfig]) -> None:
    config = read()
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 32)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (100, 64, 96)
    assert (config.dtype, config.max_model_len, config.rms_norm_eps) == ("bfloat16", 512, 1e-6)
    assert config.layer_windows == (None, None)


def test_reading_a_config_loads_neither_torch_nor_transformers(read: Callable[..., ModelConfig]) -> None:
    folder = read().folder
    code = (
        "import sys; from baton.engine.models import load_config; "
        f"load_config({str(folder)!r}, load_format='dummy'); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("architecture", "head_dim"), [("LlamaForCausalLM", 16), ("Qwen2ForCausalLM", 16), ("Qwen3ForCausalLM", 128)]
)
def test_a_head_dim_that_is_left_out_is_what_transformers_assumes(
    read: Callable[..., ModelConfig], architecture: str, head_dim: int
) -> None:
    assert read(architectures=[architecture], head_dim=None).head_dim == head_dim


def test_key_value_heads_default_to_all_heads_in_llama(read: Callable[..., ModelConfig]) -> None:
    assert read(architectures=["LlamaForCausalLM"], num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": None}, Rope(10_000.0)),
        ({}, Rope(500.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, LinearRope(500.0, 2.0)),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, Rope(7.0)),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            Llama3Rope(500.0, 8.0, 1.0, 4.0, 64),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 256}},
            YarnRope(500.0, 1.0, 256, 1.0, 32.0, 1.0, True),
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, Rope(500.0)),
    ],
)
def test_rope_is_read_in_the_form_of_transformers_4_and_5(
    read: Callable[..., ModelConfig], keys: dict[str, Any], expected: Rope
) -> None:
    assert read(**keys).rope == expected


def test_yarn_extends_the_positions_of_a_config_that_states_the_original_length(
    read: Callable[..., ModelConfig],
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read(rope_scaling=yarn).max_model_len == 2048
    assert read(rope_scaling=yarn, max_position_embeddings=2048).max_model_len == 2048


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8)),
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096)),
        ({"sliding_window": 8}, (None, None)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        (
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            (8, None),
        ),
        ({"sliding_window": 8, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}, (None, None)),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 8}, (None, None)),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            (None, 4096),
        ),
    ],
)
def test_windows_follow_the_rules_of_each_architecture(
    read: Callable[..., ModelConfig], keys: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    assert read(**keys).layer_windows == expected


def test_a_null_sliding_window_is_no_window(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**PLAIN, "architectures": ["MistralForCausalLM"], "sliding_window": None})
    )
    assert load_config(tmp_path, load_format="dummy").layer_windows == (None, None)


QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}


def experts(config: ModelConfig) -> ExpertsConfig:
    assert config.moe is not None
    return config.moe


def test_a_dense_model_has_no_experts(read: Callable[..., ModelConfig]) -> None:
    assert read().moe is None


def test_experts_are_read_under_the_names_of_transformers_4_and_5(read: Callable[..., ModelConfig]) -> None:
    found = experts(read(**QWEN3_MOE, moe_intermediate_size=24, norm_topk_prob=True))
    assert (found.num_experts, found.top_k, found.intermediate_size, found.renormalize) == (8, 2, 24, True)
    assert found.shared_intermediate_size == 0
    assert experts(read(**{**QWEN3_MOE, "num_experts": None, "num_local_experts": 6})).num_experts == 6


@pytest.mark.parametrize(
    ("keys", "sparse"),
    [
        ({}, (True, True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (False, False, False, True)),
    ],
)
def test_layers_are_mixtures_where_the_config_says(
    read: Callable[..., ModelConfig], keys: dict[str, Any], sparse: tuple[bool, ...]
) -> None:
    assert experts(read(**QWEN3_MOE, num_hidden_layers=4, **keys)).sparse_layers == sparse


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"num_experts_per_tok": 9}, "9 experts a token cannot be chosen from 8"),
        ({"mlp_only_layers": 1}, "'mlp_only_layers' must be a list"),
        ({"num_experts": 0}, "'num_experts' must be from 1"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' must be from 1"),
    ],
)
def test_experts_that_contradict_themselves_are_refused(
    read: Callable[..., ModelConfig], keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidModelConfig, match=named):
        read(**{**QWEN3_MOE, **keys})


# What sets these apart in the config.json files that their authors publish.
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rope_theta": 1e6,
    "sliding_window": None,
    "head_dim": None,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "head_dim": None,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "max_position_embeddings": 163_840,
    "rope_theta": 10_000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131_072,
    "rope_theta": 150_000,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}


def test_mixtral_is_read(read: Callable[..., ModelConfig]) -> None:
    config = read(**MIXTRAL_8X7B)
    assert (config.head_dim, config.rope, config.layer_windows) == (128, Rope(1e6), (None, None))
    assert experts(config) == ExpertsConfig(
        num_experts=8,
        top_k=2,
        intermediate_size=14336,
        intermediate_size_key="intermediate_size",
        shared_intermediate_size=0,
        renormalize=True,
        projections=("w1", "w3", "w2"),
        sparse_layers=(True, True),
    )
    assert read(**{**MIXTRAL_8X7B, "sliding_window": 4096}).layer_windows == (4096, 4096)


GEMMA2_2B = {  # as on the Hub
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


def test_gemma_2_is_read(read: Callable[..., ModelConfig]) -> None:
    config = read(**GEMMA2_2B)
    assert (config.head_dim, config.num_kv_heads, config.tie_word_embeddings) == (256, 4, True)
    assert (config.rope, config.window_rope) == (Rope(10_000.0), None)
    assert config.layer_windows == (4096, None, 4096, None)
    assert config.scales == Scales(embedding=48.0, score=1 / 12, score_cap=50.0, logit_cap=30.0)


def test_gemma_3_is_read_as_transformers_4_and_5_write_it(read: Callable[..., ModelConfig]) -> None:
    config = read(**GEMMA3_1B)
    assert (config.head_dim, config.num_kv_heads, config.tie_word_embeddings) == (256, 1, True)
    assert (config.rope, config.window_rope) == (Rope(1e6), Rope(1e4))
    assert config.layer_windows == (512, 512, 512, 512, 512, None, 512)
    assert config.scales == Scales(embedding=1152**0.5, score=1 / 16)
    scaled = read(**{**GEMMA3_1B, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert (scaled.rope, scaled.window_rope) == (LinearRope(1e6, 8.0), Rope(1e4))
    by_kind = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
    new = read(
        **{**GEMMA3_1B, "rope_theta": None, "rope_local_base_freq": None, "rope_parameters": by_kind},
        layer_types=["full_attention", *["sliding_attention"] * 6],
    )
    assert (new.rope, new.window_rope) == (LinearRope(2e6, 8.0), Rope(3e4))
    assert new.layer_windows == (None, *(512,) * 6)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (
            {**GEMMA2_2B, "hidden_activation": "gelu"},
            "hidden_activation 'gelu' is not supported, only 'gelu_pytorch_tanh'",
        ),
        ({**GEMMA2_2B, "use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({**GEMMA3_1B, "use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({**GEMMA3_1B, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        (
            {**GEMMA3_1B, "architectures": ["PaliGemmaForConditionalGeneration"]},
            r"PaliGemmaForConditionalGeneration.*no image or sound.*Gemma3ForCausalLM, Gemma3ForConditionalGeneration",
        ),
    ],
)
def test_what_of_gemma_is_not_served_is_refused_by_name(
    read: Callable[..., ModelConfig], keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(**keys)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({**GEMMA2_2B, "attn_logit_softcapping": 0}, "'attn_logit_softcapping' must be more than 0"),
        ({**GEMMA2_2B, "final_logit_softcapping": -1.0}, "'final_logit_softcapping' must be more than 0"),
        ({**GEMMA2_2B, "query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' must be more than 0"),
        (
            {**GEMMA3_1B, "rope_parameters": {"rope_type": "default"}},
            "'rope_parameters' must have those of full_attention",
        ),
        ({**GEMMA3_1B, "sliding_window": 0}, "'sliding_window' must be from 1"),
    ],
)
def test_what_of_gemma_makes_no_sense_is_refused_by_name(
    read: Callable[..., ModelConfig], keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidModelConfig, match=named):
        read(**keys)


def test_a_null_where_gemma_needs_a_number_is_refused(tmp_path: Path) -> None:
    for family, key in ((GEMMA2_2B, "query_pre_attn_scalar"), (GEMMA3_1B, "sliding_window")):
        (tmp_path / "config.json").write_text(json.dumps({**family, key: None}))
        with pytest.raises(InvalidModelConfig, match=key):
            load_config(tmp_path, load_format="dummy")


def test_null_caps_of_gemma_2_are_none_and_absent_ones_what_transformers_assumes(tmp_path: Path) -> None:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    without = {key: value for key, value in GEMMA2_2B.items() if key not in caps}
    for config, expected in ((without, (50.0, 30.0)), ({**without, **dict.fromkeys(caps)}, (None, None))):
        (tmp_path / "config.json").write_text(json.dumps(config))
        scales = load_config(tmp_path, load_format="dummy").scales
        assert (scales.score_cap, scales.logit_cap) == expected


def test_deepseek_v3_is_read(read: Callable[..., ModelConfig]) -> None:
    config = read(**DEEPSEEK_V3)
    assert config.latent == LatentShape(rank=512, q_rank=1536, nope_dim=128, rope_dim=64, value_dim=128)
    assert config.rope == YarnRope(10_000.0, 40.0, 4096, 1.0, 32.0, 1.0, True, mscale_all_dim=1.0)
    assert config.num_draft_layers == 1
    assert config.quantization is not None
    assert experts(config) == ExpertsConfig(
        num_experts=256,
        top_k=8,
        intermediate_size=2048,
        shared_intermediate_size=2048,
        scoring="sigmoid",
        renormalize=True,
        scale=2.5,
        num_groups=8,
        top_groups=4,
        group_score="top2",
        score_correction=True,
        sparse_layers=(False,) * 3 + (True,) * 58,
    )


def test_gpt_oss_is_read(read: Callable[..., ModelConfig]) -> None:
    config = read(**GPT_OSS_20B)
    assert config.layer_windows == (128, None, 128, None)
    assert config.attention_bias
    assert config.rope == YarnRope(150_000.0, 32.0, 4096, pytest.approx(1.3465735903), 32.0, 1.0, False)
    assert config.quantization is None, "experts in 4 bits are multiplied out"
    assert experts(config) == ExpertsConfig(
        num_experts=32,
        top_k=4,
        intermediate_size=2880,
        intermediate_size_key="intermediate_size",
        shared_intermediate_size=0,
        renormalize=True,
        router_bias=True,
        expert_biases=True,
        gate_slope=1.702,
        gate_limit=7.0,
        up_shift=1.0,
        stored="transposed",
        sparse_layers=(True,) * 4,
    )


def test_what_a_gpt_oss_config_leaves_out_is_what_transformers_assumes(read: Callable[..., ModelConfig]) -> None:
    left_out = ("layer_types", "rope_scaling", "rope_theta", "sliding_window", "swiglu_limit", "attention_bias")
    assert read(**{**GPT_OSS_20B, **dict.fromkeys(left_out)}).identity == read(**GPT_OSS_20B).identity


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"rope_interleave": False}, "rope_interleave"),
    ],
)
def test_another_deepseek_v3_is_refused(read: Callable[..., ModelConfig], keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(**{**DEEPSEEK_V3, **keys})


def test_groups_of_one_expert_have_no_two_best(read: Callable[..., ModelConfig]) -> None:
    with pytest.raises(InvalidModelConfig, match="16 experts in 16 groups"):
        read(**{**DEEPSEEK_V3, "n_routed_experts": 16, "n_group": 16, "topk_group": 16})


def test_identity_depends_on_the_routing(read: Callable[..., ModelConfig]) -> None:
    assert read(**QWEN3_MOE).identity != read(**QWEN3_MOE, norm_topk_prob=True).identity


def test_end_tokens_of_the_generation_config_win(read: Callable[..., ModelConfig]) -> None:
    assert read().eos_token_ids == (2,)
    assert read(eos_token_id=[5, 6, 5]).eos_token_ids == (5, 6)
    assert read(eos_token_id=None).eos_token_ids == ()
    assert read(eos_token_id=[-1, 5, 10**6]).eos_token_ids == (5,), "the others are never drawn"
    assert read(generation={"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert read(generation={"temperature": 0.6}).eos_token_ids == (2,)


def test_generation_defaults_are_those_of_the_checkpoint(read: Callable[..., ModelConfig]) -> None:
    assert read().generation.temperature is None
    defaults = read(generation={"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True}).generation
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.min_p) == (0.6, 0.9, 20, None)


def test_dtype_is_the_checkpoints_unless_asked_for(read: Callable[..., ModelConfig]) -> None:
    assert read(torch_dtype=None, dtype="float16").dtype == "float16"
    assert read(given={"dtype": "float32"}).dtype == "float32"
    assert read(torch_dtype=None).dtype == "float32"


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_linear_and_dynamic_scaling_reach_as_far_as_their_factor_where_that_is_asked_for(
    kind: str, read: Callable[..., ModelConfig]
) -> None:
    keys = {"rope_scaling": {"type": kind, "factor": 2.5}}
    assert read(**keys).max_model_len == 512
    assert read(**keys, given={"max_model_len": 1280}).max_model_len == 1280
    with pytest.raises(MaxModelLenTooLong, match=r"1281.*1280 positions"):
        read(**keys, given={"max_model_len": 1281})


def test_dynamic_scaling_is_that_of_the_longest_sequence_and_part_of_the_identity(
    read: Callable[..., ModelConfig],
) -> None:
    """Engines of other lengths turn keys otherwise: they must not read each other's."""
    keys = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    within, beyond = read(**keys, given={"max_model_len": 300}), read(**keys, given={"max_model_len": 1024})
    assert within.rope == Rope(500.0)
    assert beyond.rope == Rope(pytest.approx(500.0 * 3 ** (32 / 30)))
    assert within.identity == read(**keys).identity != beyond.identity


def test_a_longer_max_model_len_than_the_model_has_positions_is_refused(read: Callable[..., ModelConfig]) -> None:
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


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope.*yarn"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type .'yarn'. is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": "awq"}, "'quantization_config': quant_method 'awq'"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"torch_dtype": "float64"}, "float64"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["linear_attention", "full_attention"]},
            "linear_attention",
        ),
    ],
)
def test_what_no_layer_computes_is_refused_by_name(
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
    with pytest.raises(InvalidModelConfig, match=r"local folder.*hf download"):
        load_config("Qwen/Qwen3-0.6B")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold an object"):
        load_config(tmp_path)


def test_identity_of_dummy_weights_depends_on_what_is_computed_and_the_seed_only(
    read: Callable[..., ModelConfig],
) -> None:
    identity = read().identity
    assert identity == read(transformers_version="9", generation={"temperature": 0.5}).identity
    assert identity == read(given={"max_model_len": 100}).identity
    assert identity != read(given={"seed": 1}).identity
    assert identity != read(rope_theta=501.0).identity
    assert identity != read(rms_norm_eps=1e-5).identity


LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_key_value_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 48,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts_per_tok": 2,
}


def cache_of(config: ModelConfig) -> tuple[CacheKind, int, int, int]:
    """What all layers keep: the kind, KV heads, planes and dimensions."""
    group = config.caches.only
    assert group.layers == tuple(range(config.num_layers))
    return group.kind, group.blocks.num_kv_heads, group.blocks.num_planes, group.blocks.head_dim


def test_latents_are_what_a_token_keeps_where_a_model_has_them(read: Callable[..., ModelConfig]) -> None:
    assert read().latent is None
    assert cache_of(read()) == (CacheKind.FULL, 2, 2, 32)
    config = read(**{**LATENT, "q_lora_rank": 20})
    assert config.latent == LatentShape(rank=48, q_rank=20, nope_dim=24, rope_dim=8, value_dim=16)
    assert cache_of(config) == (CacheKind.LATENT, 1, 1, 56)
    assert (config.head_dim, config.rotary_dim) == (32, 8)


def test_queries_come_from_a_latent_of_their_own_unless_the_config_says_null(
    tmp_path: Path, read: Callable[..., ModelConfig]
) -> None:
    assert read(**LATENT).latent == LatentShape(48, 1536, 24, 8, 16), "left out, as in transformers"
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, **LATENT}))
    assert load_config(tmp_path, load_format="dummy").latent == LatentShape(48, None, 24, 8, 16)


def test_latents_that_no_layer_computes_are_refused(read: Callable[..., ModelConfig], tmp_path: Path) -> None:
    with pytest.raises(InvalidModelConfig, match=r"qk_nope_head_dim \(23\) and qk_rope_head_dim \(8\) .* not 31"):
        read(**{**LATENT, "qk_nope_head_dim": 23})
    with pytest.raises(InvalidModelConfig, match=r"qk_rope_head_dim \(7\) must be even"):
        read(**{**LATENT, "qk_rope_head_dim": 7})
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, **LATENT, "attention_bias": True}))
    with pytest.raises(UnsupportedModel, match="attention_bias without a q_lora_rank"):
        load_config(tmp_path, load_format="dummy")
