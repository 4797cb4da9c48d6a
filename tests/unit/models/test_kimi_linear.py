"""Kimi Linear as published: config.json, names of tensors, and options that are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.core.layout import CacheKind, StateLayout, StatePart, StateRows
from baton.engine.hf_config.attention import LatentShape
from baton.engine.hf_config.errors import InvalidModelConfig, ModelError, UnsupportedModel
from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.hf_config.rope import NO_ROPE
from baton.engine.models import load_config, load_model

from ...helpers.checkpoints import write_checkpoint
from ...helpers.paged import chunked_logprobs, random_tokens

FULL_LAYERS = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR_48B: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": FULL_LAYERS,
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 28) if layer not in FULL_LAYERS],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1_048_576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163_840,
}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ModelConfig]:
    """Return a function that reads the published config.json with changes; `linear` changes linear_attn_config."""

    def make(linear: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
        inner = {**KIMI_LINEAR_48B["linear_attn_config"], **(linear or {})}
        keys = {**KIMI_LINEAR_48B, "linear_attn_config": inner, **changes}
        (tmp_path / "config.json").write_text(json.dumps(keys))
        return load_config(tmp_path, load_format="dummy")

    return make


def test_the_published_config_is_read(read: Callable[..., ModelConfig]) -> None:
    config = read()
    assert (config.num_layers, config.max_model_len, config.rope) == (27, 1_048_576, NO_ROPE)
    assert config.latent == LatentShape(rank=512, q_rank=None, nope_dim=128, rope_dim=64, value_dim=128)
    assert config.linear is not None
    assert [number for number, linear in enumerate(config.linear.layers, 1) if not linear] == FULL_LAYERS
    assert config.moe == ExpertsConfig(
        num_experts=256,
        top_k=8,
        intermediate_size=1024,
        shared_intermediate_size=1024,
        scoring="sigmoid",
        renormalize=True,
        scale=2.446,
        group_score="top2",
        score_correction=True,
        projections=("w1", "w3", "w2"),
        sparse_layers=(False,) + (True,) * 26,
    )


def test_layers_keep_latents_or_a_state(read: Callable[..., ModelConfig]) -> None:
    latents, states = read().caches.groups
    assert (latents.kind, latents.kv.head_dim, [layer + 1 for layer in latents.layers]) == (
        CacheKind.LATENT,
        576,
        FULL_LAYERS,
    )
    assert states.kind is CacheKind.STATE
    assert isinstance(states.blocks, StateLayout)
    assert states.blocks.parts == (
        StatePart((3 * 4096, 3), "bfloat16", rows=(StateRows(32, 128),) * 3),
        StatePart((32, 128, 128), "float32"),
    )


def test_keys_of_transformers_mean_the_same_as_those_of_the_authors(read: Callable[..., ModelConfig]) -> None:
    kinds = ["full_attention" if layer in FULL_LAYERS else "linear_attention" for layer in range(1, 28)]
    other = read(
        linear_attn_config=None,
        layer_types=kinds,
        mlp_layer_types=["dense", *["sparse"] * 26],
        linear_head_dim=128,
        linear_num_heads=32,
        linear_conv_kernel_dim=4,
    )
    assert (other.linear, other.moe, other.identity) == (read().linear, read().moe, read().identity)


def test_layer_kinds_follow_transformers_without_a_key(read: Callable[..., ModelConfig]) -> None:
    linear = read(linear_attn_config={"head_dim": 64, "num_heads": 16}, num_hidden_layers=9).linear
    assert linear is not None
    assert linear.layers == (True, True, True, True, False, True, True, True, False)
    assert (linear.key_dim, linear.num_value_heads, linear.conv_width, linear.gate_rank) == (64, 16, 4, 64)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"mla_use_nope": False}, UnsupportedModel, "mla_use_nope false"),
        ({"mla_use_output_gate": True}, UnsupportedModel, "mla_use_output_gate true"),
        ({"moe_layer_freq": 2}, UnsupportedModel, "moe_layer_freq 2 .*only 1"),
        ({"use_grouped_topk": False}, UnsupportedModel, "use_grouped_topk false"),
        ({"routed_expert_hidden_size": 512}, UnsupportedModel, "routed_expert_hidden_size 512 .*only null"),
        ({"moe_router_activation_func": "softmax"}, UnsupportedModel, "moe_router_activation_func 'softmax'"),
        ({"tie_word_embeddings": True}, UnsupportedModel, "tie_word_embeddings true"),
        ({"attention_bias": True}, UnsupportedModel, "attention_bias without a q_lora_rank"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act 'gelu'"),
        ({"linear": {"head_dim": 72}}, UnsupportedModel, "linear_head_dim 72"),
        ({"linear": {"short_conv_kernel_size": 5}}, UnsupportedModel, "linear_conv_kernel_dim 5"),
        ({"linear": {"num_heads": 0}}, InvalidModelConfig, "linear_attn_config: 'num_heads' must be from 1"),
        ({"linear": {"full_attn_layers": [4, 8]}}, InvalidModelConfig, "each of the 27 layers once"),
        ({"linear": {"full_attn_layers": 4}}, InvalidModelConfig, "each of the 27 layers once"),
        ({"linear_attn_config": [4]}, InvalidModelConfig, "'linear_attn_config' must be an object"),
        ({"layer_types": ["linear_attention"] * 27}, UnsupportedModel, "without a full_attention layer"),
        ({"layer_types": ["sliding_attention"] * 27}, UnsupportedModel, "sliding_attention"),
        ({"mlp_layer_types": ["sparse"]}, InvalidModelConfig, "'mlp_layer_types' must name"),
        ({"mlp_layer_types": ["thick"] * 27}, InvalidModelConfig, "'mlp_layer_types' must name"),
        ({"num_expert_group": 256}, InvalidModelConfig, "rated by their two best experts"),
    ],
)
def test_unsupported_options_are_refused_by_name(
    read: Callable[..., ModelConfig], changes: dict[str, Any], error: type[ModelError], text: str
) -> None:
    with pytest.raises(error, match=text):
        read(**changes)


def test_dense_layers_load_under_either_name(tmp_path: Path) -> None:
    """transformers stores them under the name of MoE layers, the authors as `mlp`."""
    theirs, published = (write_checkpoint(tmp_path / name, "kimi_linear") for name in ("theirs", "published"))
    file, first = published / "model.safetensors", "model.layers.0."
    tensors = {
        name.replace(f"{first}block_sparse_moe.", f"{first}mlp."): tensor for name, tensor in load_file(file).items()
    }
    assert f"{first}mlp.down_proj.weight" in tensors
    save_file(tensors, file)
    tokens = random_tokens(20)
    first_logprobs, second_logprobs = (
        chunked_logprobs(load_model(load_config(folder)), tokens, 20) for folder in (theirs, published)
    )
    assert torch.equal(first_logprobs, second_logprobs)
