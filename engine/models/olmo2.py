"""OLMo 2 (arXiv:2501.00656)."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm, QKNorm
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family


class Olmo2Layer(DecoderLayer):
    """x + norm(attention(x)), then x + norm(mlp(x)); one norm over all query heads, and one over all key heads."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = layers.GatedMLP(config.hidden_size, config.intermediate_size)
        self.post_feedforward_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, after=self.post_attention_layernorm)
        step.feed_forward(self.mlp, after=self.post_feedforward_layernorm)


FAMILY = Family(
    architecture="Olmo2ForCausalLM",
    layer=Olmo2Layer,
    cache=keys_and_values,
    attention=AttentionForm(qk_norm=QKNorm.WIDTH),
    defaults={"rms_norm_eps": 1e-5},
)
