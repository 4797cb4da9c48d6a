"""MiniMax-M2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm, QKNorm
from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.base import Layer
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family

if TYPE_CHECKING:
    from baton.engine.layers.base import Slot


class MiniMaxM2Layer(DecoderLayer):
    """x + attention(norm(x)), then x + experts(norm(x)).

    One norm over all query heads, and one over all key heads; `rotary_dim` dimensions of each head are rotated.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        assert config.moe is not None, "a config of this family has experts"
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = layers.MoE(config.hidden_size, config.moe)

    def children(self) -> Iterator[tuple[str, Layer]]:
        for name, child in super().children():
            yield "block_sparse_moe" if child is self.mlp else name, child

    def slots(self, path: str = "") -> Iterator[Slot]:
        for slot in super().slots(path):
            slot.name = slot.name.replace(".gate.e_score_correction_bias", ".e_score_correction_bias")
            yield slot

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


def read_experts(keys: Keys, num_layers: int) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=keys.integer("num_local_experts", 256),
        top_k=keys.integer("num_experts_per_tok", 8),
        intermediate_size=keys.integer("intermediate_size"),
        intermediate_size_key="intermediate_size",
        shared_intermediate_size=0,
        scoring="sigmoid",
        renormalize=True,
        score_correction=True,
        projections=("w1", "w3", "w2"),
        sparse_layers=(True,) * num_layers,
    )


FAMILY = Family(
    architecture="MiniMaxM2ForCausalLM",
    layer=MiniMaxM2Layer,
    cache=keys_and_values,
    attention=AttentionForm(qkv_bias=False, output_bias=False, qk_norm=QKNorm.WIDTH),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5_000_000.0},
    key_names={"num_experts": "num_local_experts"},
    only={"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True},
    rotary_fraction=1.0,
    rotary_dim_key="rotary_dim",
    experts=read_experts,
)
