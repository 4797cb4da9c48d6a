"""Published configs of GLM, MiniMax, Phi, OLMo 3, SmolLM3, EXAONE, Hy3, ERNIE and Ministral."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton.engine.hf_config.attention import LatentShape
from baton.engine.hf_config.errors import InvalidModelConfig, UnsupportedModel
from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.hf_config.rope import NO_ROPE, LinearRope, QueryGrowth, Rope, Rotation, ScaledRope, YarnRope

from .published_configs import experts

Read = Callable[..., ModelConfig]

# The distinctive keys of the published config.json files, with fewer layers.
GLM_4_5 = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 12_288,
    "max_position_embeddings": 131_072,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "use_qk_norm": True,
}
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rope_theta": 5_000_000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "use_routing_bias": True,
}
PHI_4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "head_dim": None,
    "hidden_size": 3072,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10_000.0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "sliding_window": 262_144,
}
MINISTRAL_3 = {
    "architectures": ["Ministral3ForCausalLM"],
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16_384,
        "rope_theta": 1_000_000.0,
        "rope_type": "yarn",
        "type": "yarn",
    },
    "sliding_window": None,
}


def test_glm_is_read(read: Read) -> None:
    config = read(**GLM_4_5)
    assert (config.rotation(0).dim, config.norms_heads, config.attention_bias) == (64, True, True)
    assert experts(config) == ExpertsConfig(
        num_experts=160,
        top_k=8,
        intermediate_size=1536,
        shared_intermediate_size=1536,
        scoring="sigmoid",
        renormalize=True,
        scale=2.5,
        group_score="top2",
        score_correction=True,
        sparse_layers=(False, False, False, True, True),
    )
    assert config.with_draft_layers().num_run_layers == 6
    assert not read(**{**GLM_4_5, "use_qk_norm": None}).norms_heads
    with pytest.raises(UnsupportedModel, match=r"topk_method 'greedy' .*Glm4MoeForCausalLM, only 'noaux_tc'"):
        read(**GLM_4_5, topk_method="greedy")
    assert read(**{**GLM_4_5, "num_nextn_predict_layers": None, "num_mtp_layers": 0}).num_draft_layers == 0


def test_glm_flash_has_latents_and_lists_its_layers_with_experts(read: Read) -> None:
    keys = {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "num_hidden_layers": 3,
        "head_dim": None,
    }
    config = read(**keys)
    assert config.latent == LatentShape(512, 768, 192, 64, 256)
    assert experts(config).sparse_layers == (False, True, True)
    assert (experts(config).num_experts, experts(config).top_k, experts(config).scale) == (64, 4, 1.8)
    listed = read(**keys, mlp_layer_types=["dense", "dense", "sparse"])
    assert experts(listed).sparse_layers == (False, False, True)


def test_minimax_is_read(read: Read) -> None:
    config = read(**MINIMAX_M2)
    assert config.rotations == (Rotation(Rope(5_000_000.0), 64),)
    assert experts(config).score_correction
    with pytest.raises(UnsupportedModel, match=r"scoring_func 'softmax' .*MiniMaxM2ForCausalLM, only 'sigmoid'"):
        read(**{**MINIMAX_M2, "scoring_func": "softmax"})
    with pytest.raises(InvalidModelConfig, match="'rotary_dim' must be from 1 to 128"):
        read(**{**MINIMAX_M2, "rotary_dim": 129})


def test_phi_chooses_its_factors_by_the_longest_sequence(read: Read) -> None:
    growth = (1 + 5 / 12) ** 0.5  # 131 072 is 2 ** 5 times 4096, which is 2 ** 12
    long, short = read(**PHI_4_MINI), read(**PHI_4_MINI, given={"max_model_len": 4096})
    assert (long.max_model_len, long.rotation(0).dim) == (131_072, 96)
    assert long.rope == ScaledRope(10_000.0, (2.0,) * 48, pytest.approx(growth))
    assert short.rope == ScaledRope(10_000.0, (1.0,) * 48, pytest.approx(growth))
    scaling: Any = PHI_4_MINI["rope_scaling"]
    assert read(**{**PHI_4_MINI, "rope_scaling": {**scaling, "type": "su"}}).rope == long.rope


def test_only_olmo_3_layers_without_a_window_stretch_their_rope(read: Read) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32}
    config = read(
        architectures=["Olmo3ForCausalLM"],
        num_hidden_layers=4,
        max_position_embeddings=65_536,
        rope_theta=500_000,
        rope_scaling=yarn,
    )
    assert config.layer_windows == (4096, 4096, 4096, None)
    assert isinstance(config.rope, YarnRope)
    assert config.window_rope == Rope(500_000.0)


def test_smollm3_does_not_rotate_every_fourth_layer(read: Read) -> None:
    config = read(architectures=["SmolLM3ForCausalLM"], num_hidden_layers=8)
    rotates = Rotation(Rope(500.0), 32)
    assert [config.rotation(layer) for layer in range(4)] == [rotates, rotates, rotates, Rotation(NO_ROPE, 16)]
    assert config.rotations == (rotates, Rotation(NO_ROPE, 16))
    assert config.layer_windows == (None,) * 8
    windows = read(
        architectures=["SmolLM3ForCausalLM"], no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=8
    )
    assert windows.layer_windows == (8, None)
    with pytest.raises(InvalidModelConfig, match="'no_rope_layers' must be a list of 2 times 0 or 1"):
        read(architectures=["SmolLM3ForCausalLM"], no_rope_layers=[1])


def test_exaone_rotates_only_layers_with_a_window(read: Read) -> None:
    keys: dict[str, Any] = {"architectures": ["Exaone4ForCausalLM"], "num_hidden_layers": 4}
    config = read(**keys, sliding_window_pattern="LLLG")
    assert config.layer_windows == (4096, 4096, 4096, None)
    assert [config.rotation(layer).rope == NO_ROPE for layer in range(4)] == [False, False, False, True]
    with pytest.raises(InvalidModelConfig, match="letters L and G, not 'LX'"):
        read(**keys, sliding_window_pattern="LX")


def test_hy3_has_an_mlp_in_its_first_layer(read: Read) -> None:
    config = read(architectures=["HYV3ForCausalLM"], num_hidden_layers=3)
    assert experts(config).sparse_layers == (False, True, True)
    assert (experts(config).num_experts, experts(config).scale, experts(config).wide_router) == (192, 2.826, True)
    with pytest.raises(UnsupportedModel, match="mlp_bias true"):
        read(architectures=["HYV3ForCausalLM"], mlp_bias=True)


@pytest.mark.parametrize(
    ("architecture", "key"), [("Ernie4_5ForCausalLM", "use_bias"), ("SeedOssForCausalLM", "attention_out_bias")]
)
def test_biases_that_no_published_model_has_are_refused(read: Read, architecture: str, key: str) -> None:
    read(architectures=[architecture], **{key: False})
    with pytest.raises(UnsupportedModel, match=f"{key} true is not supported for {architecture}, only false"):
        read(architectures=[architecture], **{key: True})


def test_ernie_has_experts_from_its_second_layer_on(read: Read) -> None:
    keys = {"architectures": ["Ernie4_5_MoeForCausalLM"], "num_hidden_layers": 4, "moe_num_experts": 64, "moe_k": 6}
    moe = experts(read(**keys, moe_layer_end_index=2))
    assert moe.sparse_layers == (False, True, True, False)
    assert (moe.num_experts, moe.top_k, moe.scoring, moe.shared_intermediate_size) == (64, 6, "softmax", 2 * 1536)
    assert experts(read(**keys, moe_layer_end_index=-1, moe_layer_interval=2)).sparse_layers == (False, True) * 2


@pytest.mark.parametrize("count", [-1, 10**6])
def test_a_number_of_shared_experts_that_cannot_be_is_refused(read: Read, count: int) -> None:
    keys = {"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_num_shared_experts": count}
    with pytest.raises(InvalidModelConfig, match="'moe_num_shared_experts' must be from 0 to 1024"):
        read(**keys)
    assert experts(read(**{**keys, "moe_num_shared_experts": 0})).shared_intermediate_size == 0


def test_queries_of_ministral_grow_beyond_its_original_context(read: Read) -> None:
    config = read(**MINISTRAL_3)
    assert config.query_growth == QueryGrowth(0.1, 16_384)
    assert read(**{**MINISTRAL_3, "rope_parameters": None}).query_growth == QueryGrowth(0.1, 16_384)
    plain = {"rope_type": "default", "rope_theta": 1e6}
    assert read(**{**MINISTRAL_3, "rope_parameters": plain}).query_growth is None
    assert read(**MINISTRAL_3, rope_scaling={"type": "linear", "factor": 2.0}).query_growth is None


def test_rope_scaling_replaces_the_newer_key(read: Read) -> None:
    """`transformers` reads them in the same way."""
    ropes = {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.75},
    }
    config = read(**{**GLM_4_5, "partial_rotary_factor": None, **ropes})
    assert config.rotations == (Rotation(LinearRope(1e6, 2.0), 96),)
