"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783)."""

from __future__ import annotations

from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.attention import Attention
from baton.engine.layers.decoder import CausalLM
from baton.engine.layers.mlp import FeedForward, GatedMLP


class LlamaForCausalLM(CausalLM):
    """The plain decoder; biases where the config asks for them."""

    @classmethod
    def make_attention(cls, config: ModelConfig, layer: int) -> Attention:
        return Attention(config, layer, qkv_bias=config.attention_bias, output_bias=config.attention_bias)

    @classmethod
    def make_mlp(cls, config: ModelConfig, layer: int) -> FeedForward:
        return GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
