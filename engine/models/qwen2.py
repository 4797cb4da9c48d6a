"""Qwen2 and Qwen2.5 (arXiv:2407.10671)."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm, WindowRule
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family


class Qwen2Layer(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    The projections of queries, keys and values have biases, whatever the config says; nothing else has.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = layers.GatedMLP(config.hidden_size, config.intermediate_size)

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    layer=Qwen2Layer,
    cache=keys_and_values,
    attention=AttentionForm(qkv_bias=True, output_bias=False),
    defaults={"num_key_value_heads": 32, "max_window_layers": 28},
    windows=WindowRule(switched=True, listed=True, from_layer=True),
)
