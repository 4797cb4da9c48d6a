"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434)."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import read_latent
from baton.engine.hf_config.errors import UnsupportedModel
from baton.engine.hf_config.experts import ExpertsConfig, read_num_experts, sparse_after_dense
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import latents
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family


class DeepseekV2Layer(DecoderLayer):
    """x + latent attention(norm(x)), then x + mlp(norm(x)); after the first layers, the MLP is a mixture of experts."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        assert config.moe is not None, "a config of this family has experts"
        self.input_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = layers.LatentAttention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: layers.FeedForward
        if config.moe.sparse_layers[index]:
            self.mlp = layers.MoE(config.hidden_size, config.moe)
        else:
            self.mlp = layers.GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


def read_experts(keys: Keys, num_layers: int) -> ExpertsConfig:
    method = keys.values.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"config.json: topk_method {method!r} is not supported for DeepSeek-V2")
    grouped = method == "group_limited_greedy"
    width = keys.integer("moe_intermediate_size", 1407)
    return ExpertsConfig(
        num_experts=read_num_experts(keys, ("n_routed_experts", "num_experts", "num_local_experts"), 64),
        top_k=keys.integer("num_experts_per_tok"),
        intermediate_size=width,
        shared_intermediate_size=width * keys.integer("n_shared_experts", 2, maximum=1024),
        scale=keys.number("routed_scaling_factor", 1.0),
        num_groups=keys.integer("n_group", 1) if grouped else 1,
        top_groups=keys.integer("topk_group", 1) if grouped else 1,
        sparse_layers=sparse_after_dense(keys, 0, num_layers),
    )


FAMILY = Family(
    architecture="DeepseekV2ForCausalLM",
    layer=DeepseekV2Layer,
    cache=latents,
    only={"norm_topk_prob": False},
    experts=read_experts,
    latent=read_latent,
)
