"""Hy3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm, QKNorm
from baton.engine.hf_config.experts import ExpertsConfig, sparse_as_listed
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family

if TYPE_CHECKING:
    from baton.engine.layers.base import Slot


class HyV3Layer(DecoderLayer):
    """x + attention(norm(x)), then x + experts(norm(x)), in the first layer x + mlp(norm(x)).

    A norm on every query and key head comes before the rotation.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        assert config.moe is not None, "a config of this family has experts"
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: layers.FeedForward
        if config.moe.sparse_layers[index]:
            self.mlp = layers.MoE(config.hidden_size, config.moe, names={"shared_experts": "shared_mlp"})
        else:
            self.mlp = layers.GatedMLP(config.hidden_size, config.intermediate_size)

    def slots(self, path: str = "") -> Iterator[Slot]:
        for slot in super().slots(path):
            slot.name = slot.name.replace(".mlp.gate.e_score_correction_bias", ".mlp.expert_bias")
            slot.name = slot.name.replace(".mlp.gate.weight", ".mlp.router.gate.weight")
            yield slot

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


def read_experts(keys: Keys, num_layers: int) -> ExpertsConfig:
    width = keys.integer("moe_intermediate_size", 1536)
    sparse = sparse_as_listed(keys, num_layers)
    return ExpertsConfig(
        num_experts=keys.integer("num_experts", 192),
        top_k=keys.integer("num_experts_per_tok", 8),
        intermediate_size=width,
        shared_intermediate_size=width * keys.integer("num_shared_experts", 1, maximum=1024),
        scoring="sigmoid",
        renormalize=True,
        scale=keys.number("router_scaling_factor", 2.826),
        score_correction=True,
        wide_router=True,
        sparse_layers=tuple(layer > 0 for layer in range(num_layers)) if sparse is None else sparse,
    )


def draft_layers(config: ModelConfig) -> tuple[str, ...]:
    """Return the pattern of the draft layer's tensors, which are not loaded."""
    return (f"model.layers.{config.num_layers}.*",)


FAMILY = Family(
    architecture="HYV3ForCausalLM",
    layer=HyV3Layer,
    cache=keys_and_values,
    attention=AttentionForm(qk_norm=QKNorm.HEAD),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0},
    key_names={"num_local_experts": "num_experts"},
    only={"mlp_bias": False},
    experts=read_experts,
    ignored_tensors=draft_layers,
)
