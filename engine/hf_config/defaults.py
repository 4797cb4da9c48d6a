"""Defaults of `transformers` for keys that a config.json leaves out, where architectures disagree or a null says no."""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "max_window_layers": 28},
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_window_layers": 28,
    },
    "DeepseekV2ForCausalLM": {},
    "DeepseekV3ForCausalLM": {"norm_topk_prob": True, "rope_interleave": True, "num_nextn_predict_layers": 1},
    "Qwen3MoeForCausalLM": {"num_key_value_heads": 4},
    "MixtralForCausalLM": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "GptOssForCausalLM": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}
