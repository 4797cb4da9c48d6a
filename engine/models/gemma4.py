"""Gemma 4, the models of text without experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from baton.engine import layers
from baton.engine.hf_config.attention import FULL, SLIDING, HeadShape, WindowRule, read_kv_sources
from baton.engine.hf_config.errors import InvalidModelConfig, UnsupportedModel
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.model_config import LayerInputShape, ModelConfig, Scales, keys_and_values_or_shared
from baton.engine.layers.base import Layer, Parameter
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family

ROPES: Mapping[str, Any] = {
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}


class Gemma4Layer(DecoderLayer):
    """x + norm(attention(norm(x))), x + norm(mlp(norm(x))), x + norm(the layer's input, gated by x), times a factor.

    All but every sixth layer have a window, and heads and a rope of their own. Values are normed, too. The last layers
    may read keys and values of earlier ones, and values may be keys before norm and rotation.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        size, eps, bias = config.hidden_size, config.rms_norm_eps, config.attention_bias
        self.input_layernorm = layers.RMSNorm(size, eps)
        self.self_attn = layers.Attention(
            config, index, qkv_bias=bias, output_bias=bias, qk_norm="head", v_norm=config.kv_source(index) == index
        )
        self.post_attention_layernorm = layers.RMSNorm(size, eps)
        self.pre_feedforward_layernorm = layers.RMSNorm(size, eps)
        self.mlp = layers.GatedMLP(size, config.mlp_width(index), activation=layers.Activation.GELU_TANH)
        self.post_feedforward_layernorm = layers.RMSNorm(size, eps)
        self.layer_input: layers.LayerInput | None = None
        if config.layer_inputs is not None:
            self.layer_input = layers.LayerInput(size, config.layer_inputs.width, index)
            self.post_per_layer_input_norm = layers.RMSNorm(size, eps)
        self.layer_scalar = Parameter(1, typical=1.0)

    def children(self) -> Iterator[tuple[str, Layer]]:
        for name, child in super().children():
            if child is self.layer_input:
                yield from child.children()  # checkpoints have no name for it
            else:
                yield name, child

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm, behind=self.post_attention_layernorm)
        step.feed_forward(self.mlp, before=self.pre_feedforward_layernorm, behind=self.post_feedforward_layernorm)
        if self.layer_input is not None:
            step.feed_forward(self.layer_input, behind=self.post_per_layer_input_norm)
        step.multiply(self.layer_scalar.data)


def read_kinds(keys: Keys, num_layers: int) -> list[str]:
    """Return the kinds of layers where none are listed: the last one sees all keys."""
    return [SLIDING if (layer + 1) % 6 and layer + 1 < num_layers else FULL for layer in range(num_layers)]


def read_heads(keys: Keys) -> tuple[HeadShape, HeadShape]:
    """Read heads of full layers, where transformers writes them for each layer or the authors once, and of others."""
    if keys.flag("enable_moe_block", False):
        raise UnsupportedModel("config.json: enable_moe_block is not supported: experts of Gemma 4 are not served yet")
    kinds = keys.values.get("layer_types")
    if isinstance(kinds, list) and kinds and kinds[-1] == SLIDING:
        raise UnsupportedModel(f"config.json: layer_types that end in {SLIDING} are not supported")
    num_kv_heads, dim = keys.integer("num_key_value_heads"), keys.integer("head_dim")
    shares_projection = keys.flag("attention_k_eq_v", False)
    own = _of_full_layers(keys, kinds)
    if own is None:
        full_dim = keys.integer("global_head_dim", 512)
        full_kv_heads = keys.integer("num_global_key_value_heads", num_kv_heads) if shares_projection else num_kv_heads
    else:
        full_dim, full_kv_heads = own.integer("head_dim", dim), own.integer("num_key_value_heads", num_kv_heads)
    if keys.integer("num_attention_heads") % full_kv_heads or full_dim % 2:
        raise InvalidModelConfig(
            f"config.json: {full_kv_heads} KV heads of {full_dim} in full_attention layers do not fit the model"
        )
    return HeadShape(full_kv_heads, full_dim, full_dim, not shares_projection), HeadShape(num_kv_heads, dim, dim)


def _of_full_layers(keys: Keys, kinds: object) -> Keys | None:
    """Return the keys that `per_layer_config` has for every full layer; None without it."""
    given = keys.values.get("per_layer_config")
    if not given:
        return None
    full = {str(layer) for layer, kind in enumerate(kinds) if kind == FULL} if isinstance(kinds, list) else None
    first = next(iter(given.values())) if isinstance(given, dict) else None
    if not isinstance(first, dict) or set(given) != full or any(each != first for each in given.values()):
        raise UnsupportedModel(
            f"config.json: per_layer_config is supported where it says the same of each {FULL} layer, and of no other"
        )
    if unknown := set(first) - {"head_dim", "num_key_value_heads"}:
        raise UnsupportedModel(f"config.json: per_layer_config of {', '.join(sorted(unknown))} is not supported")
    return Keys("config.json: per_layer_config", first)


def read_layer_inputs(keys: Keys) -> LayerInputShape | None:
    width = keys.optional_integer("hidden_size_per_layer_input", 256)
    if not width:
        return None
    size = keys.integer("vocab_size_per_layer_input", 262_144)
    if size < keys.integer("vocab_size"):
        raise InvalidModelConfig(f"config.json: 'vocab_size_per_layer_input' ({size}) must be at least vocab_size")
    return LayerInputShape(size, keys.integer("hidden_size_per_layer_input", 256))


def read_scales(keys: Keys) -> Scales:
    cap = keys.optional_positive("final_logit_softcapping")
    return Scales(embedding=keys.integer("hidden_size") ** 0.5, score=1.0, logit_cap=cap)


def unread_keys_and_values(config: ModelConfig) -> tuple[str, ...]:
    """Return patterns of tensors that published checkpoints have in layers that read keys and values of others."""
    shared = (layer for layer in range(config.num_layers) if config.kv_source(layer) != layer)
    names = ("k_proj.*", "v_proj.*", "k_norm.*", "v_norm.*")
    return tuple(f"model.layers.{layer}.self_attn.{name}" for layer in shared for name in names)


FAMILY = Family(
    architecture="Gemma4ForCausalLM",
    inside={"Gemma4ForConditionalGeneration": "gemma4_text"},
    layer=Gemma4Layer,
    cache=keys_and_values_or_shared,
    defaults={
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "rope_parameters": ROPES,
    },
    heads=read_heads,
    windows=WindowRule(listed=True, kinds=read_kinds, own_rope=True),
    kv_sources=read_kv_sources,
    layer_inputs=read_layer_inputs,
    scales=read_scales,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    ignored_tensors=unread_keys_and_values,
)
