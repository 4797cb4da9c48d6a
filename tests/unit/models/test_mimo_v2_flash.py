"""MiMo-V2-Flash as published: config.json, its caches, and options that are refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.config import EngineConfig
from baton.engine.core.layout import CacheKind
from baton.engine.hf_config.attention import HeadShape
from baton.engine.hf_config.errors import InvalidModelConfig, ModelError, UnsupportedModel
from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.hf_config.rope import Rope, Rotation
from baton.engine.models import load_config, load_model
from baton.engine.startup.weight_counts import weights_of_rank
from baton.kernels.moe import router_logits

from ...helpers.checkpoints import write_checkpoint

FULL_LAYERS = [0, 5, 11, 17, 23, 29, 35, 41, 47]
MIMO_V2_FLASH: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "attention_bias": False,
    "attention_value_scale": 0.707,
    "dtype": "bfloat16",
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "hybrid_layer_pattern": [0 if layer in FULL_LAYERS else 1 for layer in range(48)],
    "intermediate_size": 16_384,
    "layernorm_epsilon": 1e-5,
    "max_position_embeddings": 262_144,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": [0] + [1] * 47,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5_000_000,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_rope_theta": 10_000,
    "swa_v_head_dim": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 152_576,
}
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ModelConfig]:
    """Return a function that reads the published config.json with changes; None removes a key."""

    def make(**changes: Any) -> ModelConfig:
        keys = {**MIMO_V2_FLASH, **changes}
        left = {name: value for name, value in keys.items() if value is not None or name not in changes}
        (tmp_path / "config.json").write_text(json.dumps(left))
        return dataclasses.replace(load_config(tmp_path, load_format="dummy"), window_caches=True)

    return make


def test_the_published_config_is_read(read: Callable[..., ModelConfig]) -> None:
    config = read()
    assert [layer for layer, window in enumerate(config.layer_windows) if window is None] == FULL_LAYERS
    assert set(config.layer_windows) == {None, 129}  # 128 keys beside the query's own, as in transformers
    assert config.rotations == (Rotation(Rope(5e6), 64), Rotation(Rope(1e4), 64))
    assert config.scales.attention_output == 0.707
    assert config.moe == ExpertsConfig(
        num_experts=256,
        top_k=8,
        intermediate_size=2048,
        shared_intermediate_size=0,
        scoring="sigmoid",
        renormalize=True,
        group_score="top2",
        score_correction=True,
        wide_router=True,
        sparse_layers=(False,) + (True,) * 47,
    )


def test_routers_keep_their_stored_dtype(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "mimo_v2_flash", dtype="bfloat16")
    file, name = folder / "model.safetensors", "model.layers.1.mlp.gate.weight"
    stored = torch.randn(8, 64)
    save_file({**load_file(file), name: stored}, file)
    model = load_model(load_config(folder))
    held = {slot.name: slot.parameter.data for slot in model.slots() if slot.name.endswith(".mlp.gate.weight")}
    assert torch.equal(held[name], stored)
    hidden = torch.randn(3, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(router_logits(hidden, stored), hidden.float() @ stored.T)


@pytest.mark.parametrize("ranks", [1, 4])
def test_plans_count_routers_in_float32_and_plain_output_projections(
    read: Callable[..., ModelConfig], ranks: int
) -> None:
    plain = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(48)]
    described = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    sizes = []
    for ignored in ([], plain):
        model = read(quantization_config={**described, "ignored_layers": ignored})
        sizes.append(weights_of_rank(model, EngineConfig(model="m", tensor_parallel_size=ranks)))
    both, published = sizes
    outputs = 48 * 4096 * 64 * 128 / ranks
    assert (published.wide, published.plain, published.narrow) == (
        47 * 256 * 4096,
        both.plain + outputs,
        both.narrow - outputs,
    )
    # With four ranks, each has 192 rows of keys of a full-attention layer, which is not a whole number of blocks.
    multiplied_out = 9 * 4096 * (64 * 192 + 4 * 192 + 4 * 128) / 4 if ranks == 4 else 0
    embeddings, norms = 2 * 152_576 * 4096 / ranks, (2 * 48 + 1) * 4096
    assert both.plain == embeddings + norms + multiplied_out


def test_a_row_of_the_cache_is_a_key_and_its_value(read: Callable[..., ModelConfig]) -> None:
    full, windowed = read().caches.groups
    assert (full.kind, windowed.kind, windowed.window) == (CacheKind.FULL, CacheKind.WINDOW, 129)
    assert list(full.layers) == FULL_LAYERS
    assert [(group.kv.num_kv_heads, group.kv.num_planes, group.kv.head_dim) for group in (full, windowed)] == [
        (4, 1, 320),
        (8, 1, 320),
    ]
    assert full.kv.block_bytes == 9 * 4 * 16 * (192 + 128) * 2


def test_keys_of_transformers_mean_the_same_as_those_of_the_authors(read: Callable[..., ModelConfig]) -> None:
    kinds = ["full_attention" if layer in FULL_LAYERS else "sliding_attention" for layer in range(48)]
    other = read(
        hybrid_layer_pattern=None,
        layer_types=kinds,
        moe_layer_freq=None,
        mlp_layer_types=["dense"] + ["sparse"] * 47,
        rope_parameters=ROPES,
        rope_theta=None,
        swa_rope_theta=None,
        partial_rotary_factor=None,
        sliding_window=129,
        sliding_window_size=None,
        layernorm_epsilon=None,
        rms_norm_eps=1e-5,
    )
    assert other.identity == read().identity


def test_layer_kinds_follow_transformers_without_a_key(read: Callable[..., ModelConfig]) -> None:
    other = read(hybrid_layer_pattern=None, moe_layer_freq=None, swa_num_key_value_heads=None)
    assert other.identity == read().identity
    assert other.window_heads == HeadShape(8, 192, 128)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"scoring_func": "softmax"}, UnsupportedModel, "scoring_func 'softmax'"),
        ({"topk_method": "greedy"}, UnsupportedModel, "topk_method 'greedy'"),
        ({"n_shared_experts": 1}, UnsupportedModel, "n_shared_experts 1 .*only 0"),
        ({"add_full_attention_sink_bias": True}, UnsupportedModel, "add_full_attention_sink_bias true .*only false"),
        ({"add_swa_attention_sink_bias": False}, UnsupportedModel, "add_swa_attention_sink_bias false .*only true"),
        ({"swa_head_dim": 128}, UnsupportedModel, "swa_head_dim 128"),
        ({"swa_v_head_dim": 192}, UnsupportedModel, "swa_v_head_dim 192"),
        ({"swa_num_attention_heads": 32}, UnsupportedModel, "swa_num_attention_heads 32"),
        ({"swa_num_key_value_heads": 3}, InvalidModelConfig, "a multiple of 3 KV heads"),
        ({"hybrid_layer_pattern": [0, 1]}, InvalidModelConfig, "'hybrid_layer_pattern' must be a list of 48"),
        ({"moe_layer_freq": [0] * 47 + [2]}, InvalidModelConfig, "'moe_layer_freq' must be a list of 48"),
        ({"layer_types": ["chunked_attention"] * 48}, UnsupportedModel, "chunked_attention"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act 'gelu'"),
        (
            {"rope_parameters": {**ROPES, "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}},
            UnsupportedModel,
            "partial_rotary_factor for each kind of layer",
        ),
    ],
)
def test_unsupported_options_are_refused_by_name(
    read: Callable[..., ModelConfig], changes: dict[str, Any], error: type[ModelError], text: str
) -> None:
    with pytest.raises(error, match=text):
        read(**changes)
