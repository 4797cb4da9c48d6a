"""Mixtral 8x7B and 8x22B (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Iterator

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm, WindowRule
from baton.engine.hf_config.experts import ExpertsConfig, read_num_experts
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.base import Layer
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family


class MixtralLayer(DecoderLayer):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        assert config.moe is not None, "a config of this family has experts"
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = layers.MoE(config.hidden_size, config.moe)

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)

    def children(self) -> Iterator[tuple[str, Layer]]:
        """Yield the mixture under its name in checkpoints, which differs for those that store experts one by one."""
        for name, child in super().children():
            renamed = child is self.mlp and self.mlp.experts.stored == "each"
            yield "block_sparse_moe" if renamed else name, child


def read_experts(keys: Keys, num_layers: int) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=read_num_experts(keys, ("num_local_experts", "num_experts"), 8),
        top_k=keys.integer("num_experts_per_tok", 2),
        intermediate_size=keys.integer("intermediate_size"),
        intermediate_size_key="intermediate_size",
        shared_intermediate_size=0,
        renormalize=True,
        projections=("w1", "w3", "w2"),
        sparse_layers=(True,) * num_layers,
    )


FAMILY = Family(
    architecture="MixtralForCausalLM",
    layer=MixtralLayer,
    cache=keys_and_values,
    attention=AttentionForm(qkv_bias=False, output_bias=False),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    windows=WindowRule(),
    experts=read_experts,
)
