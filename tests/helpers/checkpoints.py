"""Tiny random Hugging Face checkpoints of every supported architecture, written by `transformers` itself.

    folder = write_checkpoint(tmp_path / "m", "qwen3", shards=3, rope=ROPES["yarn"])

Every parameter is random, also biases and norms, which `transformers` would initialize to zero and one: a loader or
layer that leaves one out then gives other logits. The same arguments give the same bytes.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

from .tiny_shapes import DIFFERENCES, ROPES, SHAPE

STATEFUL = (  # those with recurrent states
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "kimi_linear",
    "olmo_hybrid",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
)
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
    "glm4_moe",
    "glm4_moe_lite",
    "olmo3",
    "seed_oss",
    "granite",
    "minimax_m2",
    "smollm3",
    "exaone4",
    "hy_v3",
    "phi3",
    "glm",
    "glm4",
    "ernie4_5",
    "ernie4_5_moe",
    "ministral3",
)
# Architectures whose output layer may be tied to the embedding:
TIED = tuple(name for name in ARCHITECTURES if name not in ("nemotron_h", "kimi_linear"))

# In bfloat16, for models of these sizes:
NEAR_TIE = 0.25  # of a logprob: about the largest rounding error
MISROUTED = 0.125  # of an MoE's tokens: rounding sends some to other, nearly tied experts, which changes any logit


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
    """Write config.json, generation_config.json and safetensors (at least `shards` files); return `folder`.

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
    """Rewrite the weights of an OLMo Hybrid as they are published.

    `transformers` cuts its convolutions into three equal parts, whatever the widths of q, k and v, and renames one of
    attention's norms.
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
    """Return the `transformers` model that `write_checkpoint` saves: the reference of the parity tests."""
    from transformers import AutoConfig, AutoModelForCausalLM

    differences = DIFFERENCES[architecture]
    ropes = copy.deepcopy(rope or differences.get("rope_parameters") or ROPES["default"])
    keys = {**SHAPE, **differences, "rope_parameters": ropes, **config}
    hf_config = AutoConfig.for_model(architecture, **keys)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        if hasattr(module, "limit"):  # gpt-oss's experts: some versions of transformers take 7 whatever the config says
            module.limit = hf_config.swiglu_limit
    adds_one = architecture.startswith(("gemma2", "gemma3", "qwen3_5", "qwen3_next"))  # to the stored weights of norms
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
        for name, parameter in {**dict(model.named_parameters()), **buffers}.items():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:  # a gated delta net's norm of its heads is applied as it is stored
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
    """Set keys of config.json; None removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(
        json.dumps({key: value for key, value in config.items() if key not in changes or value is not None})
    )
