"""Qwen3, the dense models (arXiv:2505.09388)."""

from __future__ import annotations

from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.attention import Attention
from baton.engine.layers.decoder import CausalLM
from baton.engine.layers.norm import RMSNorm


class Qwen3Attention(Attention):
    """Grouped-query attention with a norm on every query and key head before the rotation."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer, qkv_bias=config.attention_bias, output_bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)


class Qwen3ForCausalLM(CausalLM):
    @classmethod
    def make_attention(cls, config: ModelConfig, layer: int) -> Attention:
        return Qwen3Attention(config, layer)
