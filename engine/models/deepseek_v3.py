"""DeepSeek-V3 and R1 (arXiv:2412.19437)."""

from __future__ import annotations

from baton.engine.hf_config.attention import LatentShape, read_latent
from baton.engine.hf_config.errors import UnsupportedModel
from baton.engine.hf_config.experts import ExpertsConfig, read_num_experts, sparse_after_dense
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import latents
from baton.engine.hf_config.model_config import DraftRules, ModelConfig

from . import Family
from .deepseek_v2 import DeepseekV2Layer

CHOICE_OF_EXPERTS = {"topk_method": "noaux_tc"}  # the only value that `read_experts` reads


class DeepseekV3Layer(DeepseekV2Layer):
    """The layer of V2. The config says that experts are chosen by sigmoid scores with a correction bias."""


def read_v3_latent(keys: Keys) -> LatentShape:
    if not keys.flag("rope_interleave", False):  # V2 is always interleaved
        raise UnsupportedModel("config.json: rope_interleave false is not supported: neighbouring dimensions turn")
    return read_latent(keys)


def read_experts(keys: Keys, num_layers: int) -> ExpertsConfig:
    width = keys.integer("moe_intermediate_size", 2048)
    return ExpertsConfig(
        num_experts=read_num_experts(keys, ("n_routed_experts", "num_local_experts", "num_experts"), 256),
        top_k=keys.integer("num_experts_per_tok", 8),
        intermediate_size=width,
        shared_intermediate_size=width * keys.integer("n_shared_experts", 1, maximum=1024),
        scoring="sigmoid",
        renormalize=keys.flag("norm_topk_prob", False),
        scale=keys.number("routed_scaling_factor", 2.5),
        num_groups=keys.integer("n_group", 8),
        top_groups=keys.integer("topk_group", 4),
        group_score="top2",
        score_correction=True,
        sparse_layers=sparse_after_dense(keys, 3, num_layers),
    )


def path_of_draft_layer(config: ModelConfig, number: int) -> str:
    return f"model.layers.{config.num_layers + number}"


def draft_layers(config: ModelConfig) -> tuple[str, ...]:
    """Return patterns of the draft layers' tensors, except for the draft layer that is run."""
    unread = range(config.num_run_draft_layers, config.num_draft_layers)
    return tuple(f"model.layers.{config.num_layers + index}.*" for index in unread)


DRAFT_RULES = DraftRules(
    path=path_of_draft_layer,
    layer="",
    embedding_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    norm="shared_head.norm",
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)

FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    layer=DeepseekV3Layer,
    cache=latents,
    defaults={"norm_topk_prob": True, "rope_interleave": True, "num_nextn_predict_layers": 1},
    only=CHOICE_OF_EXPERTS,
    experts=read_experts,
    latent=read_v3_latent,
    ignored_tensors=draft_layers,
    draft=DRAFT_RULES,
)
