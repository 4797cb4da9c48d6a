"""Tiny random Hugging Face checkpoints of every supported architecture, written by `transformers` itself.

    folder = write_checkpoint(tmp_path / "m", "qwen3", shards=3, rope=ROPES["yarn"])

Every parameter is random, also the biases and norms that `transformers` would start at zero and one: a loader or a
layer that leaves one out gives other logits. The same arguments give the same bytes.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "olmo2",
    "gemma2",
    "gemma3_text",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "olmo_hybrid",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "kimi_linear",
    "mimo_v2_flash",
    "gemma4_text",
)
TIED = tuple(
    name for name in ARCHITECTURES if name not in ("nemotron_h", "kimi_linear")
)  # whose head may be the embedding

# Values under which the variants differ visibly within a hundred positions of a tiny model.
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

# What sets an architecture apart from the others, so that a difference that goes missing is seen.
DIFFERENCES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 32, "sliding_window": 24},
    "qwen2": {},
    "olmo2": {},
    "gemma2": {
        "hidden_size": 96,  # its root is no number of 8 bits
        "head_dim": 32,
        "query_pre_attn_scalar": 50,
        "sliding_window": 24,
        "attn_logit_softcapping": 2.0,  # so far down that they are met
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
        "swiglu_limit": 1.0,  # so far down that it is met
    },
    "gemma4_text": {
        "hidden_size": 96,  # its root is no number of 8 bits
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


# Sizes for which a device has kernels of its own: those of the tiny models would be served in other ways.
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

# In bfloat16, of models of these sizes:
NEAR_TIE = 0.25  # of a logprob: about the largest error that rounding makes
MISROUTED = 0.125  # of a mixture's tokens: rounding sends those with nearly tied experts to others, by any distance


def wide_shape(architecture: str) -> dict[str, Any]:
    """Config keys for `write_checkpoint`."""
    return {**_WIDE, **_WIDE_OF.get(architecture, {})}


def write_checkpoint(
    folder: str | Path,
    architecture: str = "qwen3",
    *,
    dtype: str = "float32",
    shards: int = 1,
    seed: int = 0,
    rope: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Writes config.json, generation_config.json and safetensors (at least `shards` files); returns `folder`.

    `config` overrides any key of the Hugging Face config (`tie_word_embeddings=True`, `num_hidden_layers=2`, ...).
    """
    model = make_model(architecture, dtype=dtype, seed=seed, rope=rope, **config)
    folder = Path(folder)
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    shard_bytes = size_bytes if shards == 1 else size_bytes // (shards + 1)
    model.save_pretrained(folder, max_shard_size=max(shard_bytes, 1))
    if architecture == "olmo_hybrid":
        _write_as_published(model, folder, max(shard_bytes, 1))
    return folder


def _write_as_published(model: Any, folder: Path, shard_bytes: int) -> None:
    """Write the weights of an OLMo Hybrid once more: `transformers` cuts its convolutions into three equal parts,
    whatever the widths of q, k and v, and gives a norm of attention the name of another one.
    """
    from huggingface_hub import save_torch_state_dict

    config = model.config
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    delta_nets = tuple(f"model.layers.{i}." for i, kind in enumerate(config.layer_types) if kind == "linear_attention")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("conv1d.weight"):
            parts = tensor.split([keys, keys, len(tensor) - 2 * keys])
            prefix = name.removesuffix("conv1d.weight")
            tensors |= {f"{prefix}{part}_conv1d.weight": x for part, x in zip("qkv", parts, strict=True)}
        elif name.startswith(delta_nets):
            published = name.replace("post_attention_layernorm", "feedforward_layer_norm")
            tensors[published.replace("input_layernorm", "attention_layer_norm")] = tensor
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            tensors[name] = tensor
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_torch_state_dict({name: x.clone() for name, x in tensors.items()}, folder, max_shard_size=shard_bytes)


def make_model(
    architecture: str, *, dtype: str = "float32", seed: int = 0, rope: dict[str, Any] | None = None, **config: Any
) -> Any:
    """The `transformers` model that `write_checkpoint` saves: the yardstick of the parity tests."""
    from transformers import AutoConfig, AutoModelForCausalLM

    differences = DIFFERENCES[architecture]
    ropes = copy.deepcopy(rope or differences.get("rope_parameters") or ROPES["default"])
    keys = {**SHAPE, **differences, "rope_parameters": ropes, **config}
    hf_config = AutoConfig.for_model(architecture, **keys)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        if hasattr(module, "limit"):  # of gpt-oss's experts: some versions take 7 whatever the config says
            module.limit = hf_config.swiglu_limit
    adds_one = architecture.startswith(("gemma2", "gemma3", "qwen3_5", "qwen3_next"))  # to what is stored of norms
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
        for name, parameter in {**dict(model.named_parameters()), **buffers}.items():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:  # that of a delta net's heads is stored as it is
                center = 0.0 if adds_one and "linear_attn" not in name else 1.0
                parameter.copy_(center + 0.2 * noise)
            elif name.endswith("layer_scalar"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith(("mamba.dt_bias", "mixer.dt_bias")):  # most heads remember tens of tokens
                parameter.copy_(noise - 3.0)
            elif parameter.dim() == 1 or name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:  # keeps activations near 1, so that attention is peaked enough for positions to matter
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
    return model.to(getattr(torch, dtype)).eval()


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets keys of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(
        json.dumps({key: value for key, value in config.items() if key not in changes or value is not None})
    )
