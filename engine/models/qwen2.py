"""Qwen2 and Qwen2.5 (arXiv:2407.10671)."""

from __future__ import annotations

from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.attention import Attention
from baton.engine.layers.decoder import CausalLM


class Qwen2ForCausalLM(CausalLM):
    """Queries, keys and values have a bias, whatever the config says; nothing else has."""

    @classmethod
    def make_attention(cls, config: ModelConfig, layer: int) -> Attention:
        return Attention(config, layer, qkv_bias=True)
