"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783)."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family


class LlamaLayer(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); with biases if the config says so."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = layers.GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


FAMILY = Family(architecture="LlamaForCausalLM", layer=LlamaLayer, cache=keys_and_values)
