"""Qwen3, mixtures of experts (arXiv:2505.09388)."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm, QKNorm, WindowRule
from baton.engine.hf_config.errors import InvalidModelConfig
from baton.engine.hf_config.experts import ExpertsConfig, read_num_experts
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family


class Qwen3MoeLayer(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); in all or some layers, the MLP is a mixture of experts.

    A norm on every query and key head comes before the rotation.
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

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


def read_experts(keys: Keys, num_layers: int) -> ExpertsConfig:
    every = keys.integer("decoder_sparse_step", 1)
    dense = keys.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise InvalidModelConfig(f"config.json: 'mlp_only_layers' must be a list of layers, not {dense!r}")
    return ExpertsConfig(
        num_experts=read_num_experts(keys, ("num_experts", "num_local_experts"), 128),
        top_k=keys.integer("num_experts_per_tok", 8),
        intermediate_size=keys.integer("moe_intermediate_size", 768),
        shared_intermediate_size=0,
        renormalize=keys.flag("norm_topk_prob", False),
        sparse_layers=tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers)),
    )


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    layer=Qwen3MoeLayer,
    cache=keys_and_values,
    attention=AttentionForm(qk_norm=QKNorm.HEAD),
    defaults={"num_key_value_heads": 4},
    windows=WindowRule(switched=True),
    experts=read_experts,
)
