"""Gemma 4 as published: heads by window, layers that share a cache, and options that are refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.core.layout import CacheKind, CachePlace
from baton.engine.hf_config.attention import HeadShape
from baton.engine.hf_config.errors import InvalidModelConfig, ModelError, UnsupportedModel
from baton.engine.hf_config.model_config import LayerInputShape, ModelConfig
from baton.engine.hf_config.rope import ProportionalRope, Rope, Rotation
from baton.engine.layers.rotary import cos_sin_table
from baton.engine.models import load_config, load_model

from ...helpers.checkpoints import write_checkpoint
from ...helpers.paged import chunked_logprobs, random_tokens

KINDS = ["full_attention" if (layer + 1) % 5 == 0 else "sliding_attention" for layer in range(35)]
GEMMA_4_E2B: dict[str, Any] = {  # shapes and keys of a small model with shared layers and per-layer embeddings
    "architectures": ["Gemma4ForCausalLM"],
    "attention_bias": False,
    "attention_k_eq_v": False,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": KINDS,
    "max_position_embeddings": 131_072,
    "model_type": "gemma4_text",
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
    "use_double_wide_mlp": True,
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
}
EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
OF_FULL_LAYERS = {str(layer): {"head_dim": 512} for layer, kind in enumerate(KINDS) if kind == "full_attention"}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ModelConfig]:
    """Return a function that reads the config with changes; None removes a key."""

    def make(**changes: Any) -> ModelConfig:
        keys = {**GEMMA_4_E2B, **changes}
        left = {name: value for name, value in keys.items() if value is not None or name not in changes}
        (tmp_path / "config.json").write_text(json.dumps(left))
        return dataclasses.replace(load_config(tmp_path, load_format="dummy"), window_caches=True)

    return make


def test_heads_and_ropes_depend_on_the_kind_of_a_layer(read: Callable[..., ModelConfig]) -> None:
    config = read()
    assert [config.heads_of(layer) for layer in (3, 4)] == [HeadShape(1, 256, 256), HeadShape(1, 512, 512)]
    full, windowed = Rotation(ProportionalRope(1e6, 0.25, 1.0), 512), Rotation(Rope(1e4), 256)
    assert [config.rotation(layer) for layer in (3, 4)] == [windowed, full]
    assert config.layer_inputs == LayerInputShape(262_144, 256)


def test_the_last_layers_share_the_cache_of_an_earlier_one(read: Callable[..., ModelConfig]) -> None:
    config = read()
    full, windowed = config.caches.groups
    assert (full.kind, full.layers) == (CacheKind.FULL, (4, 9, 14))
    assert (windowed.kind, windowed.kv.num_layers) == (CacheKind.WINDOW, 12)
    assert [config.kv_source(layer) for layer in (13, 14, 15, 19, 33, 34)] == [13, 14, 13, 14, 13, 14]
    assert config.caches.place_of(config.kv_source(34)) == CachePlace(0, 2)
    assert [config.mlp_width(layer) for layer in (14, 15)] == [6144, 12_288]


def test_heads_may_be_written_for_each_layer_as_transformers_does(read: Callable[..., ModelConfig]) -> None:
    other = read(global_head_dim=None, num_global_key_value_heads=None, per_layer_config=OF_FULL_LAYERS)
    assert other.identity == read().identity


def test_full_layers_without_keys_of_their_own_have_the_heads_of_others(read: Callable[..., ModelConfig]) -> None:
    config = read(global_head_dim=None, num_global_key_value_heads=None, per_layer_config={})
    assert config.full_heads == config.window_heads


def test_kv_heads_of_full_layers_apply_if_their_values_are_keys(read: Callable[..., ModelConfig]) -> None:
    assert read(num_global_key_value_heads=4).full_heads == HeadShape(1, 512, 512)
    shared = read(num_global_key_value_heads=4, attention_k_eq_v=True)
    assert shared.full_heads == HeadShape(4, 512, 512, projects_values=False)


def long_ropes(*, full: int, windowed: int) -> dict[str, Any]:
    """Return keys of longropes with so many factors, in layers with full attention and in those with a window."""
    numbers = {"full_attention": full, "sliding_attention": windowed}
    factors = {kind: {"short_factor": [1.0] * count, "long_factor": [2.0] * count} for kind, count in numbers.items()}
    return {"rope_parameters": {kind: {"rope_type": "longrope", **each} for kind, each in factors.items()}}


def test_longropes_have_a_factor_for_each_pair_of_a_layers_own_heads(read: Callable[..., ModelConfig]) -> None:
    config = read(**long_ropes(full=256, windowed=128))
    assert [cos_sin_table(each, 4).shape for each in config.rotations] == [(4, 256), (4, 512)]


def test_tables_of_angles_have_rotated_pairs_only(read: Callable[..., ModelConfig]) -> None:
    config = read()
    windowed, full = config.rotations
    assert cos_sin_table(full, 9).shape == (9, 128)  # a quarter of 512
    assert cos_sin_table(windowed, 9).shape == (9, 256)


def test_experts_are_read_if_they_are_enabled(read: Callable[..., ModelConfig]) -> None:
    config = read(**EXPERTS, num_kv_shared_layers=0, use_double_wide_mlp=False)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.top_k, config.moe.intermediate_size) == (128, 8, 704)
    assert (config.moe.gate, config.moe.stored, config.num_mlps) == ("gelu_tanh", "stacked", 35)
    assert read(**{**EXPERTS, "enable_moe_block": False}).identity == read().identity


def test_text_is_causal_in_a_config_with_bidirectional_images(read: Callable[..., ModelConfig]) -> None:
    assert read(use_bidirectional_attention="vision").identity == read().identity


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({**EXPERTS, "num_experts": None}, InvalidModelConfig, "lacks 'num_experts'"),
        ({**EXPERTS, "top_k_experts": 129}, InvalidModelConfig, "top_k_experts: 129 experts a token"),
        ({**EXPERTS, "moe_intermediate_size": 0}, InvalidModelConfig, "'moe_intermediate_size' must be from 1"),
        ({"use_bidirectional_attention": "all"}, UnsupportedModel, "use_bidirectional_attention"),
        ({"layer_types": ["sliding_attention"] * 35}, UnsupportedModel, "end in sliding_attention"),
        ({"hidden_activation": "silu"}, UnsupportedModel, "hidden_activation 'silu'"),
        ({"num_kv_shared_layers": 35}, InvalidModelConfig, "'num_kv_shared_layers' must be from 0 to 34"),
        ({"num_kv_shared_layers": 32}, InvalidModelConfig, "no full_attention layer to share from"),
        ({"vocab_size_per_layer_input": 1000}, InvalidModelConfig, "'vocab_size_per_layer_input'"),
        ({"per_layer_config": {"0": {"head_dim": 512}}}, UnsupportedModel, "per_layer_config"),
        (
            {"per_layer_config": {layer: {"head_dim": 512, "sliding_window": 9} for layer in OF_FULL_LAYERS}},
            UnsupportedModel,
            "per_layer_config of sliding_window",
        ),
        ({"attn_logit_softcapping": 50.0}, UnsupportedModel, "attn_logit_softcapping 50.0 .* only null"),
        (long_ropes(full=128, windowed=128), InvalidModelConfig, "longrope must have 256 factors"),
        (long_ropes(full=256, windowed=256), InvalidModelConfig, "longrope must have 128 factors"),
        ({"global_head_dim": 511}, InvalidModelConfig, "KV heads of 511"),
    ],
)
def test_unsupported_options_are_refused_by_name(
    read: Callable[..., ModelConfig], changes: dict[str, Any], error: type[ModelError], text: str
) -> None:
    with pytest.raises(error, match=text):
        read(**changes)


def test_key_and_value_weights_of_sharing_layers_are_not_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "gemma4_text")
    tokens, file = random_tokens(20), folder / "model.safetensors"
    expected = chunked_logprobs(load_model(load_config(folder)), tokens, 20)
    tensors = load_file(file)
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.4.self_attn.{name}.weight"] = torch.ones(8, 8)
    save_file(tensors, file)
    assert torch.equal(chunked_logprobs(load_model(load_config(folder)), tokens, 20).view(-1), expected.view(-1))
