"""Qwen3-Next: three layers of Gated DeltaNet (arXiv:2412.06464), then one of attention; mixtures of many experts."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm, QKNorm, read_linear_attention
from baton.engine.hf_config.layer_caches import keys_and_values_or_states
from baton.engine.hf_config.model_config import ModelConfig

from . import Family
from .qwen3_5 import DRAFT_RULES, GATES, NORM_OFFSET, draft_layers
from .qwen3_5_moe import Qwen35MoeLayer, read_experts_and_shared


class Qwen3NextLayer(Qwen35MoeLayer):
    """The layer of Qwen3.5's mixtures, or a dense one if the config says so. Delta nets are stored by key head."""

    def make_delta_net(self, config: ModelConfig, index: int) -> layers.GatedDeltaNet:
        return layers.GatedDeltaNet(config, index, stored="by key head")

    def make_mlp(self, config: ModelConfig, index: int) -> layers.FeedForward:
        assert config.moe is not None, "a config of this family has experts"
        if config.moe.sparse_layers[index]:
            return super().make_mlp(config, index)
        return layers.GatedMLP(config.hidden_size, config.intermediate_size)


FAMILY = Family(
    architecture="Qwen3NextForCausalLM",
    layer=Qwen3NextLayer,
    cache=keys_and_values_or_states,
    attention=AttentionForm(qk_norm=QKNorm.HEAD, gated=True),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    only=GATES,
    linear=read_linear_attention,
    experts=read_experts_and_shared,
    rotary_fraction=0.25,
    norm_offset=NORM_OFFSET,
    ignored_tensors=draft_layers,
    draft=DRAFT_RULES,
)
