"""Configs of Mixtral, Gemma, DeepSeek and gpt-oss as published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.engine.core.layout import CacheKind
from baton.engine.hf_config.attention import LatentShape
from baton.engine.hf_config.errors import InvalidModelConfig, UnsupportedModel
from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.hf_config.model_config import ModelConfig, Scales
from baton.engine.hf_config.rope import LinearRope, Rope, YarnRope
from baton.engine.models import load_config

from .published_configs import PLAIN, QWEN3_MOE, experts

# The distinctive keys of the published config.json files.
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
        ({**GEMMA3_1B, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported .*only null"),
        (
            {**GEMMA3_1B, "architectures": ["PaliGemmaForConditionalGeneration"]},
            r"PaliGemmaForConditionalGeneration.*no image or sound.*Gemma3ForCausalLM, Gemma3ForConditionalGeneration",
        ),
    ],
)
def test_unsupported_options_of_gemma_are_refused_by_name(
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
def test_invalid_options_of_gemma_are_refused_by_name(
    read: Callable[..., ModelConfig], keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidModelConfig, match=named):
        read(**keys)


def test_a_null_where_gemma_needs_a_number_is_refused(tmp_path: Path) -> None:
    for family, key in ((GEMMA2_2B, "query_pre_attn_scalar"), (GEMMA3_1B, "sliding_window")):
        (tmp_path / "config.json").write_text(json.dumps({**family, key: None}))
        with pytest.raises(InvalidModelConfig, match=key):
            load_config(tmp_path, load_format="dummy")


def test_null_caps_of_gemma_2_are_none_and_absent_ones_have_the_defaults_of_transformers(tmp_path: Path) -> None:
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
    assert config.quantization is None, "experts in 4 bits are dequantized"
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


def test_keys_that_a_gpt_oss_config_leaves_out_have_the_defaults_of_transformers(
    read: Callable[..., ModelConfig],
) -> None:
    left_out = ("layer_types", "rope_scaling", "rope_theta", "sliding_window", "swiglu_limit", "attention_bias")
    assert read(**{**GPT_OSS_20B, **dict.fromkeys(left_out)}).identity == read(**GPT_OSS_20B).identity


@pytest.mark.parametrize("limit", [-7.0, 0])
def test_a_limit_of_gpt_oss_that_leaves_nothing_is_refused(read: Callable[..., ModelConfig], limit: float) -> None:
    with pytest.raises(InvalidModelConfig, match="'swiglu_limit' must be more than 0"):
        read(**{**GPT_OSS_20B, "swiglu_limit": limit})


def test_null_ropes_have_the_defaults_of_transformers(read: Callable[..., ModelConfig], tmp_path: Path) -> None:
    expected = read(**GPT_OSS_20B)
    keys = {**PLAIN, **GPT_OSS_20B, "rope_scaling": None, "rope_parameters": None}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    assert load_config(tmp_path, load_format="dummy").rope == expected.rope


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
    """Return the cache of all layers: kind, KV heads, planes and dimensions."""
    group = config.caches.only
    assert group.layers == tuple(range(config.num_layers))
    return group.kind, group.blocks.num_kv_heads, group.blocks.num_planes, group.blocks.head_dim


def test_the_cache_of_a_model_with_latents_holds_latents(read: Callable[..., ModelConfig]) -> None:
    assert read().latent is None
    assert cache_of(read()) == (CacheKind.FULL, 2, 2, 32)
    config = read(**{**LATENT, "q_lora_rank": 20})
    assert config.latent == LatentShape(rank=48, q_rank=20, nope_dim=24, rope_dim=8, value_dim=16)
    assert cache_of(config) == (CacheKind.LATENT, 1, 1, 56)
    assert (config.head_dim, config.rotation(0).dim) == (32, 8)


def test_queries_come_from_a_latent_of_their_own_unless_the_config_says_null(
    tmp_path: Path, read: Callable[..., ModelConfig]
) -> None:
    assert read(**LATENT).latent == LatentShape(48, 1536, 24, 8, 16), "a missing key has the default of transformers"
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, **LATENT}))
    assert load_config(tmp_path, load_format="dummy").latent == LatentShape(48, None, 24, 8, 16)


def test_unsupported_latent_shapes_are_refused(read: Callable[..., ModelConfig], tmp_path: Path) -> None:
    with pytest.raises(InvalidModelConfig, match=r"qk_nope_head_dim \(23\) and qk_rope_head_dim \(8\) .* not 31"):
        read(**{**LATENT, "qk_nope_head_dim": 23})
    with pytest.raises(InvalidModelConfig, match=r"qk_rope_head_dim \(7\) must be even"):
        read(**{**LATENT, "qk_rope_head_dim": 7})
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, **LATENT, "attention_bias": True}))
    with pytest.raises(UnsupportedModel, match="attention_bias without a q_lora_rank"):
        load_config(tmp_path, load_format="dummy")
