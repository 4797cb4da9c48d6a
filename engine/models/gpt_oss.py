"""gpt-oss 20b and 120b (arXiv:2508.10925)."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import FULL, SLIDING, AttentionForm, Sinks, WindowRule
from baton.engine.hf_config.experts import ExpertsConfig, read_num_experts
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family


class GptOssLayer(DecoderLayer):
    """x + attention(norm(x)), then x + experts(norm(x)); biases, a sink in every head, a window in every second layer.

    Experts clamp their activations. Checkpoints call the gate that chooses experts `router`.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        assert config.moe is not None, "a config of this family has experts"
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = layers.MoE(config.hidden_size, config.moe, names={"gate": "router"})

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


def read_experts(keys: Keys, num_layers: int) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=read_num_experts(keys, ("num_local_experts", "num_experts"), 128),
        top_k=keys.integer("num_experts_per_tok", 4),
        intermediate_size=keys.integer("intermediate_size"),
        intermediate_size_key="intermediate_size",
        shared_intermediate_size=0,
        renormalize=True,  # softmax over the chosen experts' logits equals softmax over all, renormalized
        router_bias=True,
        expert_biases=True,
        gate_slope=keys.number("swiglu_alpha", 1.702),
        gate_limit=keys.optional_positive("swiglu_limit") or 7.0,
        up_shift=1.0,
        stored="transposed",
        sparse_layers=(True,) * num_layers,
    )


FAMILY = Family(
    architecture="GptOssForCausalLM",
    layer=GptOssLayer,
    cache=keys_and_values,
    attention=AttentionForm(sinks=Sinks.ALL),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    windows=WindowRule(listed=True, turns=(SLIDING, FULL)),
    experts=read_experts,
)
