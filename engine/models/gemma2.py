"""Gemma 2 (arXiv:2408.00118)."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import FULL, SLIDING, WindowRule
from baton.engine.hf_config.errors import InvalidModelConfig
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig, Scales
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family

NORM_OFFSET = 1.0


class Gemma2Layer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))); a window in every second layer.

    Norms multiply by 1 + weight, MLPs have GELU, embeddings are scaled by the root of their width, and attention scores
    and logits are capped.
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


def read_scales(keys: Keys) -> Scales:
    scalar = keys.optional_positive("query_pre_attn_scalar")
    if scalar is None:
        raise InvalidModelConfig("config.json: 'query_pre_attn_scalar' must be a number, not null")
    return Scales(
        embedding=keys.integer("hidden_size") ** 0.5,
        score=scalar**-0.5,
        score_cap=keys.optional_positive("attn_logit_softcapping"),
        logit_cap=keys.optional_positive("final_logit_softcapping"),
    )


FAMILY = Family(
    architecture="Gemma2ForCausalLM",
    layer=Gemma2Layer,
    cache=keys_and_values,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    windows=WindowRule(listed=True, turns=(SLIDING, FULL)),
    scales=read_scales,
    norm_offset=NORM_OFFSET,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
)
