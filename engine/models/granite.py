"""Granite 3, dense models."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family
from .granitemoehybrid import read_scales


class GraniteLayer(DecoderLayer):
    """x + attention(norm(x)) * m, then x + mlp(norm(x)) * m, with `residual_multiplier` m."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        size, eps, scales = config.hidden_size, config.rms_norm_eps, config.scales
        self.input_layernorm = layers.RMSNorm(size, eps)
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(size, eps)
        self.mlp = layers.GatedMLP(
            size, config.intermediate_size, bias=config.mlp_bias, output_multiplier=scales.mlp_output
        )

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


FAMILY = Family(architecture="GraniteForCausalLM", layer=GraniteLayer, cache=keys_and_values, scales=read_scales)
