"""What `transformers` assumes where a config.json leaves a key out and architectures disagree."""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"use_sliding_window": False},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "use_sliding_window": False, "max_window_layers": 28},
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    "DeepseekV2ForCausalLM": {"use_sliding_window": False},
    "DeepseekV3ForCausalLM": {"use_sliding_window": False, "num_nextn_predict_layers": 1},
    "Qwen3MoeForCausalLM": {"num_key_value_heads": 4, "use_sliding_window": False},
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

# Kinds of layers in turns, of architectures that have several and a config that does not name them layer by layer.
LAYERS_IN_TURNS = {"GptOssForCausalLM": ("sliding_attention", "full_attention")}
