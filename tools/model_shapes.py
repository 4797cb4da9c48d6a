"""Write folders of models that engines and servers are compared with: published proportions, weights made up.

    python tools/model_shapes.py FOLDER                             # all shapes, for load_format "dummy"
    python tools/model_shapes.py FOLDER qwen3-next-8 --weights      # ... and normal random weights, by transformers

Each folder has config.json and a tokenizer whose words are w3, w4 ... up to the vocabulary's size. With equal weights
in files two engines send tokens to the same experts; with dummy weights they do not. `--weights` uses a GPU, if any.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any

STANDARD_DEVIATION = 0.02
DUMMY_ONLY = {"quantization_config", "num_nextn_predict_layers"}  # fields of shapes for which no weights are written
SPECIAL = ("<unk>", "<s>", "</s>")
COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "dtype": "bfloat16",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
}
QWEN3_8B: dict[str, Any] = QWEN3 | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
QWEN3_NEXT: dict[str, Any] = {  # 3 gated delta nets to 1 attention layer
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN3_8B,
    # An EAGLE-3 head, and the model that it drafts for: with random numbers that both share it is nearly always right,
    # if it knows all tokens.
    "qwen3-8b-32k": QWEN3_8B | {"vocab_size": 32000},
    "qwen3-8b-32k-eagle3": QWEN3_8B
    | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": 32000,
        "draft_vocab_size": 32000,
    },
    "qwen3-8b-fp8": QWEN3_8B
    | {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        }
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "dsv2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rms_norm_eps": 1e-5,
    },
    "gemma3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    # Cut, so that their weights fit beside caches.
    "qwen3-next-8": QWEN3_NEXT | {"num_hidden_layers": 8},
    "qwen3-next-8-mtp": QWEN3_NEXT | {"num_hidden_layers": 8, "vocab_size": 32000, "num_nextn_predict_layers": 1},
    "qwen3-next-16-mtp": QWEN3_NEXT | {"num_hidden_layers": 16, "vocab_size": 32000, "num_nextn_predict_layers": 1},
}


def write_config(folder: Path, shape: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(COMMON | shape, indent=1))
    vocab = {token: index for index, token in enumerate(SPECIAL)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": token, "special": True, **flags} for token, index in vocab.items()],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": vocab | {f"w{index}": index for index in range(len(vocab), shape["vocab_size"])},
            "unk_token": SPECIAL[0],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    named = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | options))


def write_weights(folder: Path) -> None:
    """Write normal random weights for the config in a folder. Norms scale by about 1, decays of states are moderate."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config_file = folder / "config.json"
    config = config_file.read_text()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model = model.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        norms = [module for module in model.modules() if "Norm" in type(module).__name__]
        for parameter in model.parameters():
            parameter.normal_(0, STANDARD_DEVIATION)
        for norm in norms:
            parameter = getattr(norm, "weight", None)
            if parameter is not None and _multiplies_by(norm, parameter):
                parameter.add_(1)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(0, 2.7)
            elif name.endswith("dt_bias"):
                parameter.fill_(1)
    model.save_pretrained(folder, max_shard_size="5GB")
    config_file.write_text(config)  # as an author would write it


def _multiplies_by(norm: Any, weight: Any) -> bool:
    """Return whether a norm multiplies by its weight; Gemma's and Qwen3-Next's multiply by 1 + weight."""
    import torch

    before, x = weight.clone(), torch.ones(2, weight.shape[0], device=weight.device, dtype=weight.dtype)
    inputs = inspect.signature(norm.forward).parameters  # one, or a gate as well
    weight.zero_()
    is_zero = not norm(*[x] * len(inputs)).any()
    weight.copy_(before)
    return is_zero


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}; by default all")
    parser.add_argument("--weights", action="store_true", help="also write safetensors")
    given = parser.parse_args()
    if unknown := sorted(set(given.shapes) - set(SHAPES)):
        parser.error(f"no shape {', '.join(unknown)}: choose from {', '.join(SHAPES)}")
    names = given.shapes or list(SHAPES)
    if given.weights and (dummy := [name for name in names if not DUMMY_ONLY.isdisjoint(SHAPES[name])]):
        parser.error(f"--weights: transformers writes no quantized weights and no draft layers, as {dummy} would need")
    for name in names:
        write_config(given.folder / name, SHAPES[name])
        if given.weights:
            write_weights(given.folder / name)
        print(given.folder / name, file=sys.stderr)


if __name__ == "__main__":
    main()
