"""GLM-4.7-Flash: GLM-4.5's experts with the latent attention of DeepSeek-V3 (arXiv:2412.19437)."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.hf_config.experts import ExpertsConfig, sparse_as_listed
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import latents

from . import Family
from .deepseek_v3 import CHOICE_OF_EXPERTS, DRAFT_RULES, DeepseekV3Layer, draft_layers, read_experts, read_v3_latent


class Glm4MoeLiteLayer(DeepseekV3Layer):
    """The layer of DeepSeek-V3."""


def read_listed_experts(keys: Keys, num_layers: int) -> ExpertsConfig:
    experts = read_experts(keys, num_layers)
    return replace(experts, sparse_layers=sparse_as_listed(keys, num_layers) or experts.sparse_layers)


FAMILY = Family(
    architecture="Glm4MoeLiteForCausalLM",
    layer=Glm4MoeLiteLayer,
    cache=latents,
    defaults={
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "rope_interleave": True,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "num_nextn_predict_layers": 1,
    },
    key_names={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    only=CHOICE_OF_EXPERTS,
    experts=read_listed_experts,
    latent=read_v3_latent,
    ignored_tensors=draft_layers,
    draft=DRAFT_RULES,
)
