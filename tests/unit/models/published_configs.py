"""Published configs that several tests change and read."""

from __future__ import annotations

from typing import Any

from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.hf_config.model_config import ModelConfig

from .small_config import SIZES

PLAIN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    **SIZES,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}


def experts(config: ModelConfig) -> ExpertsConfig:
    assert config.moe is not None
    return config.moe
