"""Qwen3.5, text models with experts: the layers of `qwen3_5`, with a mixture of experts in place of the MLP."""

from __future__ import annotations

import dataclasses

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm, QKNorm, read_linear_attention
from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import keys_and_values_or_states
from baton.engine.hf_config.model_config import ModelConfig

from . import Family
from .qwen3_5 import DRAFT_RULES, GATES, NORM_OFFSET, Qwen35Layer, draft_layers
from .qwen3_moe import read_experts


class Qwen35MoeLayer(Qwen35Layer):
    """The dense models' layer with a mixture: each token goes to some experts, and to a shared expert with a gate."""

    def make_mlp(self, config: ModelConfig, index: int) -> layers.FeedForward:
        assert config.moe is not None, "a config of this family has experts"
        return layers.MoE(config.hidden_size, config.moe, gated_expert=True)


def read_experts_and_shared(keys: Keys, num_layers: int) -> ExpertsConfig:
    shared = keys.integer("shared_expert_intermediate_size", 512)
    return dataclasses.replace(read_experts(keys, num_layers), shared_intermediate_size=shared)


FAMILY = Family(
    architecture="Qwen3_5MoeForCausalLM",
    multimodal={"Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text"},
    layer=Qwen35MoeLayer,
    cache=keys_and_values_or_states,
    attention=AttentionForm(qk_norm=QKNorm.HEAD, gated=True),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 512,  # unused: all layers are mixtures
        "num_experts": 256,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    only={**GATES, "mlp_only_layers": [], "decoder_sparse_step": 1},
    linear=read_linear_attention,
    experts=read_experts_and_shared,
    rotary_fraction=0.25,
    norm_offset=NORM_OFFSET,
    ignored_tensors=draft_layers,
    draft=DRAFT_RULES,
)
