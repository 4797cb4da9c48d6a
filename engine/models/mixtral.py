"""Mixtral 8x7B and 8x22B (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Iterator

from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.base import Slot
from baton.engine.layers.decoder import CausalLM
from baton.engine.layers.mlp import FeedForward
from baton.engine.layers.moe import MoE


class MixtralMoE(MoE):
    """Under a name of its own in checkpoints that store each expert by itself."""

    def slots(self, path: str = "") -> Iterator[Slot]:
        if self.experts.stored == "each":
            path = f"{path.removesuffix('mlp')}block_sparse_moe"
        yield from super().slots(path)


class MixtralForCausalLM(CausalLM):
    """The plain decoder with a mixture in every layer."""

    @classmethod
    def make_mlp(cls, config: ModelConfig, layer: int) -> FeedForward:
        assert config.moe is not None, "a config of this architecture has experts"
        return MixtralMoE(config.hidden_size, config.moe)
