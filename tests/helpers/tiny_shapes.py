"""The shapes of tiny models of every architecture, as keys of Hugging Face configs."""

from __future__ import annotations

from typing import Any

# Values with which the RoPE variants differ visibly within a hundred positions of a tiny model.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}


SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


_DELTA_NETS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}


_GATED_MIXTURE: dict[str, Any] = {
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}


_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_chunk_size": 16,
}


# The features that distinguish an architecture, so that a test notices when one of them gets lost.
DIFFERENCES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 32, "sliding_window": 24},
    "qwen2": {},
    "olmo2": {},
    "gemma2": {
        "hidden_size": 96,  # its square root has more than 8 bits
        "head_dim": 32,
        "query_pre_attn_scalar": 50,
        "sliding_window": 24,
        "attn_logit_softcapping": 2.0,  # low enough that tiny models reach it
        "final_logit_softcapping": 2.5,
    },
    "gemma3_text": {
        "hidden_size": 96,
        "head_dim": 32,
        "query_pre_attn_scalar": 50,
        "sliding_window": 24,
        "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "qwen3": {"head_dim": 32},
    "qwen3_5_text": _DELTA_NETS,
    "qwen3_5_moe_text": {**_DELTA_NETS, **_GATED_MIXTURE},
    "qwen3_next": {**_DELTA_NETS, **_GATED_MIXTURE, "norm_topk_prob": True, "mlp_only_layers": [3]},
    "olmo_hybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 48,
        "linear_value_head_dim": 32,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {
        **_MAMBA,
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "embedding_multiplier": 1.7,
        "lm_head_multiplier": 0.6,
        "mlp_multipliers": [0.8, 0.7],
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.9,
        "ssm_multipliers": [1.2, 0.9, 0.8, 1.1, 0.7],
        "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 0.8,
    },
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "position_embedding_type": "rope",
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 40,
        "shared_intermediate_size": 48,
        "embedding_multiplier": 3.3,
        "logits_scaling": 1.6,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.3,
    },
    "nemotron_h": {
        "head_dim": 32,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 32,
        "chunk_size": 16,
        "time_step_min": 1e-30,  # transformers clamps the time steps of prompts to it
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "qwen3_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "mixtral": {"intermediate_size": 40, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 24},
    "gpt_oss": {
        "head_dim": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "swiglu_limit": 1.0,  # low enough that tiny models reach it
    },
    "gemma4_text": {
        "hidden_size": 96,  # its square root has more than 8 bits
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "global_head_dim": 48,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 1024,
        "sliding_window": 24,
        "final_logit_softcapping": 2.5,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "mimo_v2_flash": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "head_dim": 48,
        "v_head_dim": 32,
        "sliding_window": 24,
        "attention_value_scale": 0.6,
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.334},
        },
    },
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "moe_intermediate_size": 40,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    },
    "glm4_moe": {
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.8,
    },
    "glm4_moe_lite": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "olmo3": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "seed_oss": {"head_dim": 32},
    "granite": {
        "embedding_multiplier": 3.3,
        "logits_scaling": 1.6,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.3,
    },
    "minimax_m2": {
        "head_dim": 32,
        "rotary_dim": 16,
        "intermediate_size": 40,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "pad_token_id": None,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": None},
    "exaone4": {"sliding_window": 24, "sliding_window_pattern": 2},
    "phi3": {
        "sliding_window": 24,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    },
    "glm": {"head_dim": 32, "pad_token_id": None},
    "glm4": {"head_dim": 32, "pad_token_id": None},
    "ernie4_5": {"head_dim": 32},
    "ernie4_5_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 40,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 1,
    },
    "ministral3": {
        "head_dim": 32,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "hy_v3": {
        "head_dim": 32,
        "moe_intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
    },
    "kimi_linear": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "pad_token_id": None,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "moe_intermediate_size": 40,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
    },
}


# Sizes that device kernels support: the tiny models' sizes would take other code paths.
_WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
_WIDE_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}


_WIDE_DELTA_NETS: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_WIDE_GATED_MIXTURE: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
_WIDE_MAMBA: dict[str, Any] = {"mamba_d_head": 64, "mamba_d_state": 128}
_WIDE_OF: dict[str, dict[str, Any]] = {
    "bamba": _WIDE_MAMBA,
    "falcon_h1": {**_WIDE_MAMBA, "mamba_d_ssm": 512},
    "granitemoehybrid": {**_WIDE_MAMBA, "num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 128},
    "nemotron_h": {
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "moe_latent_size": 128,
    },
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
    "ernie4_5_moe": {"moe_num_experts": 16, "moe_k": 4, "moe_intermediate_size": 128},
    "hy_v3": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
    "glm4_moe": {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
    "glm4_moe_lite": {**_WIDE_LATENT, "qk_nope_head_dim": 192, "v_head_dim": 256},
    "minimax_m2": {
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 128,
        "rotary_dim": 32,
    },
    "mixtral": {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 128},
    "gpt_oss": {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 128},
    "deepseek_v2": _WIDE_LATENT,
    "gemma4_text": {"head_dim": 256, "global_head_dim": 512},
    "mimo_v2_flash": {
        "head_dim": 192,
        "v_head_dim": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
    },
    "deepseek_v3": _WIDE_LATENT,
    "kimi_linear": {
        **{name: size for name, size in _WIDE_LATENT.items() if name != "n_routed_experts"},
        "num_local_experts": 16,
        "linear_head_dim": 128,
    },
    "qwen3_5_text": _WIDE_DELTA_NETS,
    "qwen3_5_moe_text": {**_WIDE_DELTA_NETS, **_WIDE_GATED_MIXTURE},
    "qwen3_next": {**_WIDE_DELTA_NETS, **_WIDE_GATED_MIXTURE},
    "olmo_hybrid": {"linear_key_head_dim": 96, "linear_value_head_dim": 192},
}


def wide_shape(architecture: str) -> dict[str, Any]:
    """Return config keys for `write_checkpoint`."""
    return {**_WIDE, **_WIDE_OF.get(architecture, {})}
