"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434)."""

from __future__ import annotations

from torch import Tensor

from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder import CausalLM
from baton.engine.layers.mla import LatentAttention
from baton.engine.layers.mlp import FeedForward, GatedMLP
from baton.engine.layers.moe import MoE
from baton.kernels import mla
from baton.kernels.attention import AttentionBatch


class DeepseekV2ForCausalLM(CausalLM):
    """Latent attention, and experts behind the first dense layers."""

    @classmethod
    def make_attention(cls, config: ModelConfig, layer: int) -> LatentAttention:
        return LatentAttention(config, layer)

    @classmethod
    def make_mlp(cls, config: ModelConfig, layer: int) -> FeedForward:
        experts = config.moe
        if experts is not None and experts.sparse_layers[layer]:
            return MoE(config.hidden_size, experts)
        return GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def prepare(self, batch: AttentionBatch, kv: Tensor) -> AttentionBatch:
        return mla.prepare(batch, num_heads=self.num_heads, head_dim=self.config.head_dim)
