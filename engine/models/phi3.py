"""Phi-3, Phi-3.5 and Phi-4, text models (arXiv:2404.14219, arXiv:2412.08905)."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm, WindowRule
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family


class Phi3Layer(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); some models rotate only a part of each head."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = layers.GatedMLP(config.hidden_size, config.intermediate_size, merged="gate_up_proj")

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


FAMILY = Family(
    architecture="Phi3ForCausalLM",
    layer=Phi3Layer,
    cache=keys_and_values,
    attention=AttentionForm(qkv_bias=False, output_bias=False, merged=True),
    defaults={"rms_norm_eps": 1e-5},
    windows=WindowRule(),
    rotary_fraction=1.0,
)
