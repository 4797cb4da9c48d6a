"""OLMo Hybrid as published: config.json, names of tensors, and options that are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.core.layout import CacheKind, StateLayout, StatePart, StateRows
from baton.engine.hf_config.attention import LinearAttentionShape
from baton.engine.hf_config.errors import InvalidModelConfig, ModelError, UnsupportedModel, WeightsError
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.hf_config.rope import NO_ROPE, LinearRope, Rope
from baton.engine.models import load_config, load_model

from ...helpers.checkpoints import write_checkpoint

KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8
OLMO_HYBRID_7B: dict[str, Any] = {
    "architectures": ["OlmoHybridForCausalLM"],
    "attention_bias": False,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 3840,
    "intermediate_size": 11_008,
    "layer_types": KINDS,
    "linear_allow_neg_eigval": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 96,
    "linear_num_key_heads": 30,
    "linear_num_value_heads": 30,
    "linear_value_head_dim": 192,
    "max_position_embeddings": 65_536,
    "num_attention_heads": 30,
    "num_hidden_layers": 32,
    "num_key_value_heads": 30,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": 100_352,
}
SIZES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
LEFT_OUT = dict.fromkeys((*SIZES, "layer_types", "linear_allow_neg_eigval", "linear_conv_kernel_dim"))


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ModelConfig]:
    """Return a function that reads the published config.json with changes."""

    def make(**changes: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps({**OLMO_HYBRID_7B, **changes}))
        return load_config(tmp_path, load_format="dummy")

    return make


def test_the_published_config_is_read(read: Callable[..., ModelConfig]) -> None:
    config = read()
    assert (config.head_dim, config.num_kv_heads, config.max_model_len, config.rope) == (128, 30, 65_536, NO_ROPE)
    assert config.linear == LinearAttentionShape(
        layers=tuple(kind == "linear_attention" for kind in KINDS),
        num_key_heads=30,
        num_value_heads=30,
        key_dim=96,
        value_dim=192,
        conv_width=4,
        beta_scale=2.0,
    )


def test_keys_that_are_left_out_follow_from_attention(read: Callable[..., ModelConfig]) -> None:
    config = read(**LEFT_OUT)
    assert (config.linear, config.identity) == (read().linear, read().identity)
    few = read(**LEFT_OUT, num_hidden_layers=2).linear
    assert few is not None
    assert few.layers == (True, False)


def test_layers_keep_keys_and_values_or_a_state(read: Callable[..., ModelConfig]) -> None:
    full, states = read().caches.groups
    assert (full.kind, full.kv.head_dim, full.layers) == (CacheKind.FULL, 128, tuple(range(3, 32, 4)))
    assert states.kind is CacheKind.STATE
    assert isinstance(states.blocks, StateLayout)
    assert states.blocks.parts == (
        StatePart((11_520, 3), "bfloat16", rows=(StateRows(30, 96), StateRows(30, 96), StateRows(30, 192))),
        StatePart((30, 96, 192), "float32"),
    )


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope_parameters": None, "rope_theta": None}, NO_ROPE),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": None}, NO_ROPE),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}, "rope_theta": 500.0}, NO_ROPE),
        ({"rope_parameters": None}, Rope(10_000.0)),
        ({"rope_parameters": None, "rope_theta": 500.0}, Rope(500.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, Rope(500.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, LinearRope(10_000.0, 2.0)),
    ],
)
def test_attention_rotates_unless_the_theta_of_its_rope_is_null(
    read: Callable[..., ModelConfig], keys: dict[str, Any], rope: Rope
) -> None:
    """`transformers` reads these keys in the same way."""
    assert read(**keys).rope == rope


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act 'gelu'"),
        ({"linear_conv_kernel_dim": 5}, UnsupportedModel, "linear_conv_kernel_dim 5"),
        ({"linear_key_head_dim": 72}, UnsupportedModel, "linear_key_head_dim 72 .* multiples of 16 from 16 to 256"),
        ({"linear_value_head_dim": 272}, UnsupportedModel, "linear_value_head_dim 272"),
        ({"linear_num_key_heads": 4}, InvalidModelConfig, "must be a multiple of linear_num_key_heads"),
        ({"linear_allow_neg_eigval": 2}, InvalidModelConfig, "'linear_allow_neg_eigval' must be true or false"),
        ({"layer_types": ["linear_attention"] * 32}, UnsupportedModel, "without a full_attention layer"),
        ({"layer_types": ["sliding_attention"] * 32}, UnsupportedModel, "sliding_attention"),
        ({"layer_types": KINDS[:4]}, InvalidModelConfig, "names 4 layers"),
        ({"rope_scaling": {"rope_type": "linear", "rope_theta": 1e4}}, InvalidModelConfig, "need 'factor'"),
        ({"rope_scaling": "linear"}, InvalidModelConfig, "must be an object"),
    ],
)
def test_unsupported_options_are_refused_by_name(
    read: Callable[..., ModelConfig], changes: dict[str, Any], error: type[ModelError], text: str
) -> None:
    with pytest.raises(error, match=text):
        read(**changes)


def test_convolutions_in_equal_parts_are_refused(tmp_path: Path) -> None:
    """`transformers` 5.24 writes them so: each name has a third of all channels."""
    folder = write_checkpoint(tmp_path / "model", "olmo_hybrid", num_hidden_layers=2, layer_types=KINDS[2:4])
    tensors = load_file(folder / "model.safetensors")
    names = [f"model.layers.0.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    thirds = torch.cat([tensors[name] for name in names]).tensor_split(3)
    tensors |= {name: part.clone() for name, part in zip(names, thirds, strict=True)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"q_conv1d.weight \[107, 1, 4\] instead of \[96, 1, 4\]"):
        load_model(load_config(folder))
