"""Variants of every architecture, for comparisons with the models of `transformers`."""

from __future__ import annotations

from typing import Any

import torch

from baton.engine.layers.decoder import CausalLM

from ...helpers.checkpoints import ARCHITECTURES, TIED
from ...helpers.tiny_shapes import ROPES

TOLERANCE = 1e-4  # error of a logprob in float32
RECURRENT_TOLERANCE = 5e-4  # states accumulate rounding: two paths of `transformers` differ by a third of it
SENSITIVE = 2  # for a few positions, where CPUs that sum in different orders differ by so many tolerances
KINDS = ("full_attention", "sliding_attention")
GEMMA_4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40}
# name: (architecture, config keys). Every architecture, and options within one
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{architecture: (architecture, {}) for architecture in ARCHITECTURES},
    **{f"{architecture}-tied": (architecture, {"tie_word_embeddings": True}) for architecture in TIED},
    **{f"llama-rope-{name}": ("llama", {"rope": rope}) for name, rope in ROPES.items()},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-head-dim": ("llama", {"head_dim": 48}),
    "mistral-unlimited": ("mistral", {"sliding_window": None}),
    "mistral-yarn": ("mistral", {"rope": ROPES["yarn"]}),
    "qwen2-yarn": ("qwen2", {"rope": ROPES["yarn"]}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3-yarn": ("qwen3", {"rope": ROPES["yarn"]}),
    "qwen3-yarn-attention-factor": ("qwen3", {"rope": {**ROPES["yarn"], "attention_factor": 1.5}}),
    "qwen3-yarn-mscale": ("qwen3", {"rope": {**ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "qwen3-yarn-betas": ("qwen3", {"rope": {**ROPES["yarn"], "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "deepseek_v2-low-rank-queries": ("deepseek_v2", {"q_lora_rank": 24, "attention_bias": True}),
    "deepseek_v2-unequal-heads": ("deepseek_v2", {"qk_nope_head_dim": 48, "v_head_dim": 16}),
    "deepseek_v2-yarn": ("deepseek_v2", {"rope": {**ROPES["yarn"], "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek_v2-yarn-mscales": ("deepseek_v2", {"rope": {**ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    "deepseek_v2-all-sparse": ("deepseek_v2", {"first_k_dense_replace": 0, "n_shared_experts": 1}),
    "deepseek_v2-all-dense": ("deepseek_v2", {"first_k_dense_replace": 3}),
    "deepseek_v3-direct-queries": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek_v3-yarn": ("deepseek_v3", {"rope": {**ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_v3-one-group": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}),
    "deepseek_v3-raw-weights": ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.0}),
    "deepseek_v3-null-is-false": ("deepseek_v3", {"norm_topk_prob": None}),
    "deepseek_v2-stray-keys": ("deepseek_v2", {"rope_interleave": False}),
    "exaone4-no-windows": (
        "exaone4",
        {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 3},
    ),
    "exaone4-word": (
        "exaone4",
        {"sliding_window_pattern": "LLG", "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "smollm3-windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 24, "no_rope_layers": None, "no_rope_layer_interval": 2},
    ),
    "glm4_moe-plain": ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "n_group": 1, "topk_group": 1}),
    "glm4_moe_lite-direct-queries": ("glm4_moe_lite", {"q_lora_rank": None, "mlp_layer_types": None}),
    "minimax_m2-all-rotated": ("minimax_m2", {"rotary_dim": None}),
    "ministral3-window": ("ministral3", {"sliding_window": 24}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "hy_v3-listed": ("hy_v3", {"mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True}),
    "phi3-longrope": (
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 16,
            "rope": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0 + i / 8 for i in range(8)],
                "long_factor": [2.0 + i / 4 for i in range(8)],
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "mixtral-unlimited": ("mixtral", {"sliding_window": None, "num_experts_per_tok": 1}),
    "gpt_oss-yarn": (
        "gpt_oss",
        {"rope": {**ROPES["yarn"], "truncate": False, "beta_fast": 8.0}, "swiglu_alpha": 1.0, "swiglu_limit": 7.0},
    ),
    "gpt_oss-layer-types": (
        "gpt_oss",
        {"layer_types": ["full_attention", "full_attention", "sliding_attention"], "attention_bias": False},
    ),
    "gemma4_text-untied": ("gemma4_text", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma4_text-own-values": (
        "gemma4_text",
        {"attention_k_eq_v": False, "num_kv_shared_layers": 0, "num_hidden_layers": 2, "layer_types": [*KINDS][::-1]},
    ),
    "gemma4_text-many-shared": ("gemma4_text", {"num_kv_shared_layers": 4, "use_double_wide_mlp": False}),
    "gemma4_text-no-layer-inputs": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "final_logit_softcapping": None},
    ),
    "gemma4_text-even-heads": ("gemma4_text", {"global_head_dim": 32, "num_global_key_value_heads": 2}),
    "gemma4_text-experts": ("gemma4_text", GEMMA_4_EXPERTS),
    "gemma4_text-experts-own-caches": (
        "gemma4_text",
        {
            **GEMMA_4_EXPERTS,
            "top_k_experts": 3,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
        },
    ),
    "gemma4_text-half-rotated": (
        "gemma4_text",
        {
            "rope": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 2.0,
                },
                "sliding_attention": ROPES["linear"],
            }
        },
    ),
    "mimo_v2_flash-biases": ("mimo_v2_flash", {"attention_bias": True, "attention_value_scale": None}),
    "mimo_v2_flash-wide-values": ("mimo_v2_flash", {"head_dim": 48, "v_head_dim": 64}),
    "mimo_v2_flash-even": ("mimo_v2_flash", {"head_dim": 48, "v_head_dim": 48}),
    "mimo_v2_flash-groups": ("mimo_v2_flash", {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
    "olmo2-biases": ("olmo2", {"attention_bias": True}),
    "olmo2-multi-head": ("olmo2", {"num_key_value_heads": None}),
    "olmo2-yarn": ("olmo2", {"rope": ROPES["yarn"]}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-untied": ("gemma2", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2-layer-types": ("gemma2", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
    "gemma2-wide-heads": ("gemma2", {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "gemma3_text-one-rope": ("gemma3_text", {"rope": dict.fromkeys(KINDS, ROPES["theta"])}),
    "gemma3_text-layer-types": (
        "gemma3_text",
        {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma3_text-logit-cap": ("gemma3_text", {"final_logit_softcapping": 2.5, "tie_word_embeddings": False}),
    "gemma3_text-every-sixth": ("gemma3_text", {"sliding_window_pattern": 6, "num_hidden_layers": 7}),
    "qwen3_5_text-as-many-heads": ("qwen3_5_text", {"linear_num_key_heads": 4, "attention_bias": True}),
    "qwen3_5_text-interval": (
        "qwen3_5_text",
        {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_conv_kernel_dim": 3},
    ),
    "qwen3_5_text-half-rotated": ("qwen3_5_text", {"rope": {**ROPES["theta"], "partial_rotary_factor": 0.5}}),
    "olmo_hybrid-rotated": ("olmo_hybrid", {"rope": ROPES["theta"], "attention_bias": True}),
    "olmo_hybrid-yarn": ("olmo_hybrid", {"rope": ROPES["yarn"], "linear_conv_kernel_dim": 3}),
    "olmo_hybrid-no-negative-eigenvalues": ("olmo_hybrid", {"linear_allow_neg_eigval": False}),
    "olmo_hybrid-sizes-of-attention": (
        "olmo_hybrid",
        {
            "layer_types": None,
            "hidden_size": 256,
            "num_key_value_heads": None,
            **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim"), None),
            "linear_key_head_dim": None,
        },
    ),
    "bamba-biases": ("bamba", {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}),
    "bamba-plain-conv": ("bamba", {"mamba_conv_bias": False, "mamba_d_conv": 3, "mamba_n_groups": 1}),
    "bamba-time-steps": ("bamba", {"time_step_limit": [0.05, 0.2]}),
    "falcon_h1-gate-first": ("falcon_h1", {"mamba_norm_before_gate": False}),
    "falcon_h1-no-norm": ("falcon_h1", {"mamba_rms_norm": False, "mamba_n_groups": 1}),
    "falcon_h1-expanded": ("falcon_h1", {"mamba_d_ssm": None, "mamba_d_head": "auto"}),
    "falcon_h1-plain": ("falcon_h1", {"ssm_multipliers": None, "mlp_multipliers": None, "key_multiplier": 1.0}),
    "granitemoehybrid-no-rope": ("granitemoehybrid", {"position_embedding_type": None}),
    "granitemoehybrid-dense": ("granitemoehybrid", {"num_local_experts": 0, "mamba_n_groups": 1}),
    "granitemoehybrid-attention-alone": (
        "granitemoehybrid",
        {"layer_types": ["full_attention"] * 3, "num_local_experts": 0, "mamba_n_heads": 128, "mamba_d_head": 1},
    ),
    "granitemoehybrid-biases": ("granitemoehybrid", {"attention_bias": True, "mamba_proj_bias": True}),
    "nemotron_h-no-latents": ("nemotron_h", {"moe_latent_size": None, "n_group": 1, "topk_group": 1}),
    "nemotron_h-dense": ("nemotron_h", {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}),
    "nemotron_h-heads-of-80": ("nemotron_h", {"mamba_head_dim": 80, "mamba_num_heads": 6}),  # as in Nemotron Nano 2
    "nemotron_h-biases": ("nemotron_h", {"use_bias": True, "norm_topk_prob": False}),
    "kimi_linear-low-rank-queries": ("kimi_linear", {"q_lora_rank": 24, "attention_bias": True}),
    "kimi_linear-narrow": (
        "kimi_linear",
        {"linear_num_heads": 2, "linear_conv_kernel_dim": 3, "layer_types": ["full_attention", "linear_attention"] * 2},
    ),
    "kimi_linear-dense-layers": (
        "kimi_linear",
        {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"], "moe_renormalize": False, "n_shared_experts": 2},
    ),
    "kimi_linear-one-group": ("kimi_linear", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}),
    "qwen3_next-raw-weights": ("qwen3_next", {"norm_topk_prob": False, "mlp_only_layers": []}),
    "qwen3_moe-raw-weights": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "qwen3_moe-dense-layer": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3_moe-every-second": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20}),
    # Window keys of other architectures, which these ignore.
    "llama-stray-keys": ("llama", {"use_sliding_window": True, "sliding_window": 20}),
    "mistral-stray-keys": ("mistral", {"use_sliding_window": False, "max_window_layers": 2}),
    "mixtral-stray-keys": ("mixtral", {"layer_types": ["full_attention"] * 3, "max_window_layers": 2}),
    "gpt_oss-stray-keys": ("gpt_oss", {"use_sliding_window": False}),
    "qwen3_moe-stray-keys": (
        "qwen3_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 2,
            "layer_types": ["full_attention"] * 3,
        },
    ),
}
Pair = tuple[CausalLM, Any]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, model: CausalLM) -> None:
    assert not ours.isnan().any()
    tolerance = RECURRENT_TOLERANCE if model.config.has_states else TOLERANCE
    errors = (ours - theirs).abs().amax(1)
    assert errors.max().item() < SENSITIVE * tolerance
    assert (errors >= tolerance).sum().item() <= len(errors) / 50
