"""Qwen3, dense models (arXiv:2505.09388)."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm, QKNorm, WindowRule
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family


class Qwen3Layer(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); a norm on every query and key head before the rotation."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = layers.GatedMLP(config.hidden_size, config.intermediate_size)

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    multimodal={"Qwen3VLForConditionalGeneration": "qwen3_vl_text"},
    layer=Qwen3Layer,
    cache=keys_and_values,
    attention=AttentionForm(qk_norm=QKNorm.HEAD),
    defaults={"num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28},
    windows=WindowRule(switched=True, listed=True, from_layer=True),
)
