"""Gemma 3, text models (arXiv:2503.19786)."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm, QKNorm, WindowRule
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family
from .gemma2 import NORM_OFFSET, read_scales


class Gemma3Layer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))); all but every sixth layer have a window.

    As Gemma 2, but with a norm on every query and key head instead of the cap on scores. Layers with a window have a
    rope of their own.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = layers.RMSNorm(size, eps, offset=NORM_OFFSET)
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(size, eps, offset=NORM_OFFSET)
        self.pre_feedforward_layernorm = layers.RMSNorm(size, eps, offset=NORM_OFFSET)
        self.mlp = layers.GatedMLP(size, config.intermediate_size, activation=layers.Activation.GELU_TANH)
        self.post_feedforward_layernorm = layers.RMSNorm(size, eps, offset=NORM_OFFSET)

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm, after=self.post_attention_layernorm)
        step.feed_forward(self.mlp, before=self.pre_feedforward_layernorm, after=self.post_feedforward_layernorm)


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    multimodal={"Gemma3ForConditionalGeneration": "gemma3_text"},
    layer=Gemma3Layer,
    cache=keys_and_values,
    attention=AttentionForm(qk_norm=QKNorm.HEAD),
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    windows=WindowRule(listed=True, pattern=6, own_rope=True),
    only={"attn_logit_softcapping": None},  # transformers ignores it; `read_scales` would read it
    scales=read_scales,
    norm_offset=NORM_OFFSET,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
)
