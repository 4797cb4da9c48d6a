"""Mistral 7B and its successors (arXiv:2310.06825)."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm, WindowRule
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family


class MistralLayer(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); no biases. The config may set a window."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = layers.GatedMLP(config.hidden_size, config.intermediate_size)

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


FAMILY = Family(
    architecture="MistralForCausalLM",
    multimodal={"Mistral3ForConditionalGeneration": "mistral"},
    layer=MistralLayer,
    cache=keys_and_values,
    attention=AttentionForm(qkv_bias=False, output_bias=False),
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    windows=WindowRule(listed=True),
)
