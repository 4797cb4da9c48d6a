"""gpt-oss 20b and 120b (arXiv:2508.10925)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.attention import Attention
from baton.engine.layers.base import Layer, Parameter, Share
from baton.engine.layers.decoder import CausalLM
from baton.engine.layers.mlp import FeedForward
from baton.engine.layers.moe import MoE
from baton.engine.parallel.groups import ParallelGroups


class GptOssAttention(Attention):
    """Every head has a sink: a score without a key, which takes weight from the others and gives no value."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer, qkv_bias=config.attention_bias, output_bias=config.attention_bias)
        self.sinks: Parameter = Parameter(config.num_heads, dtype=torch.float32)

    def divide(self, groups: ParallelGroups) -> None:
        self.sinks.keep(0, Share.part(self.num_heads, groups.tp))
        super().divide(groups)


class GptOssMoE(MoE):
    """Checkpoints call its gate a router."""

    def children(self) -> Iterator[tuple[str, Layer]]:
        for name, child in super().children():
            yield "router" if child is self.gate else name, child


class GptOssForCausalLM(CausalLM):
    """Biases everywhere, sinks, windows in every second layer, and experts whose activations have limits."""

    @classmethod
    def make_attention(cls, config: ModelConfig, layer: int) -> Attention:
        return GptOssAttention(config, layer)

    @classmethod
    def make_mlp(cls, config: ModelConfig, layer: int) -> FeedForward:
        assert config.moe is not None, "a config of this architecture has experts"
        return GptOssMoE(config.hidden_size, config.moe)
