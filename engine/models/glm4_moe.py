"""GLM-4.5, 4.6 and 4.7 (arXiv:2508.06471)."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm, QKNorm
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family
from .deepseek_v3 import CHOICE_OF_EXPERTS, DRAFT_RULES, draft_layers, read_experts


class Glm4MoeLayer(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); after the first layers, the MLP is a mixture of experts.

    Half of each head is rotated. The larger models have a norm on every query and key head.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        assert config.moe is not None, "a config of this family has experts"
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: layers.FeedForward
        if config.moe.sparse_layers[index]:
            self.mlp = layers.MoE(config.hidden_size, config.moe)
        else:
            self.mlp = layers.GatedMLP(config.hidden_size, config.intermediate_size)

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    layer=Glm4MoeLayer,
    cache=keys_and_values,
    attention=AttentionForm(output_bias=False, qk_norm=QKNorm.HEAD, qk_norm_key="use_qk_norm"),
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1,
    },
    key_names={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    only=CHOICE_OF_EXPERTS,
    rotary_fraction=0.5,
    experts=read_experts,
    ignored_tensors=draft_layers,
    draft=DRAFT_RULES,
)
