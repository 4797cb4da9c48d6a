"""Qwen3, the mixtures of experts (arXiv:2505.09388)."""

from __future__ import annotations

from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.mlp import FeedForward
from baton.engine.layers.moe import MoE

from .qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3 whose feed-forward layers are mixtures of experts, all or some of them."""

    @classmethod
    def make_mlp(cls, config: ModelConfig, layer: int) -> FeedForward:
        assert config.moe is not None, "a config of this architecture has experts"
        if config.moe.sparse_layers[layer]:
            return MoE(config.hidden_size, config.moe)
        return super().make_mlp(config, layer)
