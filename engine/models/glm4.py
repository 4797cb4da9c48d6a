"""GLM-4-0414 and GLM-Z1, dense models (arXiv:2406.12793)."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family


class Glm4Layer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))).

    Half of each head is rotated, neighbouring dimensions together.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = layers.RMSNorm(size, eps)
        self.self_attn = layers.Attention(config, index)
        self.post_self_attn_layernorm = layers.RMSNorm(size, eps)
        self.post_attention_layernorm = layers.RMSNorm(size, eps)
        self.mlp = layers.GatedMLP(size, config.intermediate_size, merged="gate_up_proj")
        self.post_mlp_layernorm = layers.RMSNorm(size, eps)

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm, after=self.post_self_attn_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm, after=self.post_mlp_layernorm)


FAMILY = Family(
    architecture="Glm4ForCausalLM",
    layer=Glm4Layer,
    cache=keys_and_values,
    attention=AttentionForm(output_bias=False, interleaved=True),
    defaults={"attention_bias": True, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07},
    rotary_fraction=0.5,
)
