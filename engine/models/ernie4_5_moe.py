"""ERNIE 4.5, mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm
from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family

if TYPE_CHECKING:
    from baton.engine.layers.base import Slot


class Ernie45MoeLayer(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); after the first layers, the MLP is a mixture of experts.

    Neighbouring dimensions of a head are rotated together.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        assert config.moe is not None, "a config of this family has experts"
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: layers.FeedForward
        if config.moe.sparse_layers[index]:
            self.mlp = layers.MoE(config.hidden_size, config.moe)
        else:
            self.mlp = layers.GatedMLP(config.hidden_size, config.intermediate_size)

    def slots(self, path: str = "") -> Iterator[Slot]:
        for slot in super().slots(path):
            slot.name = slot.name.replace(".gate.e_score_correction_bias", ".moe_statics.e_score_correction_bias")
            yield slot

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


def read_experts(keys: Keys, num_layers: int) -> ExpertsConfig:
    width = keys.integer("moe_intermediate_size", 1536)
    first, every = keys.optional_integer("moe_layer_start_index", 1) or 0, keys.integer("moe_layer_interval", 1)
    last = keys.optional_integer("moe_layer_end_index", -1)
    if last is None or last == -1:
        last = num_layers - 1
    return ExpertsConfig(
        num_experts=keys.integer("moe_num_experts", 64),
        top_k=keys.integer("moe_k", 6),
        top_k_key="moe_k",
        intermediate_size=width,
        shared_intermediate_size=width * keys.count("moe_num_shared_experts", 2, maximum=1024),
        renormalize=True,
        score_correction=True,
        correction_is_row=True,
        wide_router=True,
        sparse_layers=tuple(first <= layer <= last and (layer + 1) % every == 0 for layer in range(num_layers)),
    )


def draft_layers(config: ModelConfig) -> tuple[str, ...]:
    """Return the patterns of the draft layers' tensors, which are not loaded."""
    return ("model.mtp_*",)


FAMILY = Family(
    architecture="Ernie4_5_MoeForCausalLM",
    layer=Ernie45MoeLayer,
    cache=keys_and_values,
    attention=AttentionForm(qkv_bias=False, output_bias=False, interleaved=True),
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    key_names={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    only={"use_bias": False, "moe_use_aux_free": True, "moe_gate": "topk"},
    experts=read_experts,
    ignored_tensors=draft_layers,
)
