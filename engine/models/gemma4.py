"""Gemma 4, text models: dense, or with experts in parallel to the MLP of every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from baton.engine import layers
from baton.engine.hf_config.attention import (
    FULL,
    SLIDING,
    AttentionForm,
    QKNorm,
    WindowRule,
    read_heads_by_window,
    read_kv_sources,
)
from baton.engine.hf_config.errors import InvalidModelConfig
from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import keys_and_values_or_shared, unread_keys_and_values
from baton.engine.hf_config.model_config import LayerInputShape, ModelConfig, Scales
from baton.engine.layers.base import Layer, Parameter
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family

ROPES: Mapping[str, Any] = {
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}


class Gemma4Layer(DecoderLayer):
    """x + norm(attention(norm(x))), x + norm(mlp(norm(x))), x + norm(per-layer input, gated by x), times a factor.

    All but every sixth layer have a window, with their own heads and rope. Values are normed, too. The last layers may
    read keys and values of earlier ones, and values may be copies of the keys before norm and rotation.

    With experts, norm(mlp(norm(x))) becomes norm(norm(mlp(norm(x))) + norm(experts(norm(x)))).
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = layers.RMSNorm(size, eps)
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(size, eps)
        self.pre_feedforward_layernorm = layers.RMSNorm(size, eps)
        self.mlp = layers.GatedMLP(size, config.mlp_width(index), activation=layers.Activation.GELU_TANH)
        self.post_feedforward_layernorm = layers.RMSNorm(size, eps)
        self.moe: layers.MoE | None = None
        if config.moe is not None:
            router = layers.NormedRouter(size, config.moe, eps)
            self.moe = layers.MoE(size, config.moe, names={"gate": "router"}, router=router)
            self.post_feedforward_layernorm_1 = layers.RMSNorm(size, eps)
            self.pre_feedforward_layernorm_2 = layers.RMSNorm(size, eps)
            self.post_feedforward_layernorm_2 = layers.RMSNorm(size, eps)
        self.layer_input: layers.LayerInput | None = None
        if config.layer_inputs is not None:
            self.layer_input = layers.LayerInput(size, config.layer_inputs.width, index)
            self.post_per_layer_input_norm = layers.RMSNorm(size, eps)
        self.layer_scalar = Parameter(1, typical=1.0)

    def children(self) -> Iterator[tuple[str, Layer]]:
        for name, child in super().children():
            # In checkpoints, the parts of these two lie directly below the layer.
            yield "" if child is self.layer_input or child is self.moe else name, child

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm, after=self.post_attention_layernorm)
        if self.moe is None:
            step.feed_forward(self.mlp, before=self.pre_feedforward_layernorm, after=self.post_feedforward_layernorm)
        else:
            step.feed_forward_side_by_side(
                layers.Branch(self.mlp, self.pre_feedforward_layernorm, self.post_feedforward_layernorm_1),
                layers.Branch(self.moe, self.pre_feedforward_layernorm_2, self.post_feedforward_layernorm_2),
                after=self.post_feedforward_layernorm,
            )
        if self.layer_input is not None:
            step.feed_forward(self.layer_input, after=self.post_per_layer_input_norm)
        step.multiply(self.layer_scalar.data)


def read_kinds(keys: Keys, num_layers: int) -> list[str]:
    """Return the kinds of layers for a config that lists none: every sixth and the last have full attention."""
    return [SLIDING if (layer + 1) % 6 and layer + 1 < num_layers else FULL for layer in range(num_layers)]


def read_layer_inputs(keys: Keys) -> LayerInputShape | None:
    width = keys.optional_integer("hidden_size_per_layer_input", 256)
    if not width:
        return None
    size = keys.integer("vocab_size_per_layer_input", 262_144)
    if size < keys.integer("vocab_size"):
        raise InvalidModelConfig(f"config.json: 'vocab_size_per_layer_input' ({size}) must be at least vocab_size")
    return LayerInputShape(size, keys.integer("hidden_size_per_layer_input", 256))


def read_experts(keys: Keys, num_layers: int) -> ExpertsConfig | None:
    if not keys.flag("enable_moe_block", False):
        return None
    return ExpertsConfig(
        num_experts=keys.integer("num_experts"),
        top_k=keys.integer("top_k_experts"),
        top_k_key="top_k_experts",
        intermediate_size=keys.integer("moe_intermediate_size"),
        shared_intermediate_size=0,
        renormalize=True,
        gate="gelu_tanh",
        normed_router=True,
        beside_mlp=True,
        stored="stacked",
        sparse_layers=(True,) * num_layers,
    )


def read_scales(keys: Keys) -> Scales:
    cap = keys.optional_positive("final_logit_softcapping")
    return Scales(embedding=keys.integer("hidden_size") ** 0.5, score=1.0, logit_cap=cap)


FAMILY = Family(
    architecture="Gemma4ForCausalLM",
    multimodal={"Gemma4ForConditionalGeneration": "gemma4_text"},
    layer=Gemma4Layer,
    cache=keys_and_values_or_shared,
    attention=AttentionForm(qk_norm=QKNorm.HEAD, v_norm=True),
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
    heads=read_heads_by_window,
    windows=WindowRule(listed=True, kinds=read_kinds, own_rope=True),
    kv_sources=read_kv_sources,
    layer_inputs=read_layer_inputs,
    experts=read_experts,
    scales=read_scales,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    ignored_tensors=unread_keys_and_values,
)
