"""Tiny FP8 checkpoints, each with an unquantized twin of exactly the same values."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.kernels import fp8

from .checkpoints import write_checkpoint
from .draft_layers import with_draft_layer

# Blocks of 128 divide all sizes but the vocabulary's.
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64, "num_hidden_layers": 2}
BLOCKS: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
WHOLE = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
# Tensors, less those that a family keeps:
_QUANTIZED = ("*proj*.weight", "*.experts.*.weight", "*_linear.weight", "*.per_layer_input_gate.weight")


def compressed_tensors(strategy: str, **weights: Any) -> dict[str, Any]:
    e4m3 = {"num_bits": 8, "type": "float"}
    group = {
        "targets": ["Linear"],
        "weights": {**e4m3, "strategy": strategy, **weights},
        "input_activations": {**e4m3, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FORMATS = {
    "blocks": BLOCKS,
    "rows": compressed_tensors("channel"),
    "compressed blocks": compressed_tensors("block", block_structure=[128, 128]),
    "whole": WHOLE,
}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}}


def write_fp8_checkpoint(
    folder: Path,
    form: str,
    architecture: str = "qwen3",
    *,
    keep: Sequence[str] = (),
    drafts: bool = False,
    **config: Any,
) -> tuple[Path, Path]:
    """Return (an FP8 checkpoint, an unquantized one of exactly the same values).

    `keep` are patterns of layers that stay unquantized in both. With `drafts` there is a draft layer.
    """
    write = with_draft_layer if drafts else write_checkpoint
    write(folder / "plain", architecture, **{**({} if drafts else SHAPE), **config})
    tensors = load_file(folder / "plain" / "model.safetensors")
    narrow, plain = dict(tensors), dict(tensors)
    kept = ["lm_head"]
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if tensor.dim() < 2 or not any(fnmatch.fnmatch(name, each) for each in _QUANTIZED):
            continue
        if any(fnmatch.fnmatch(layer, pattern) for pattern in keep):
            kept.append(layer)
            continue
        data, scale = quantized(tensor, form)
        narrow[name] = data
        narrow[f"{name}_scale_inv" if form == "blocks" else f"{name}_scale"] = scale
        if form in ("whole", "modelopt"):
            narrow[name.replace("weight", "input_scale")] = torch.ones(())
        plain[name] = dequantized(data, scale)
    save_file(plain, folder / "plain" / "model.safetensors")
    fp8_folder = folder / "fp8"
    fp8_folder.mkdir()
    save_file(narrow, fp8_folder / "model.safetensors")
    keys = json.loads((folder / "plain" / "config.json").read_text())
    described = dict(MODELOPT if form == "modelopt" else FORMATS[form])
    if form == "modelopt":
        described["ignore"] = ["lm_head", *keep]
    elif form in ("blocks", "whole"):
        described["modules_to_not_convert" if form == "blocks" else "ignored_layers"] = kept
    else:
        described["ignore"] = kept
    (fp8_folder / "config.json").write_text(json.dumps({**keys, "quantization_config": described}))
    return fp8_folder, folder / "plain"


def quantized(weight: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Quantize a weight [N, K], or a stack of them, to FP8; return it and its scales as a checkpoint stores them."""
    if weight.dim() == 3:
        matrices = [quantized(matrix, form) for matrix in weight]
        return torch.stack([data for data, _ in matrices]), torch.stack([scale for _, scale in matrices])
    if form in ("whole", "modelopt"):
        scale = weight.abs().max() / 448
        return (weight / scale).to(torch.float8_e4m3fn), scale
    made = fp8.quantize_weight(weight, in_blocks="blocks" in form)
    return made.data, made.scale[:, None] if form == "rows" else made.scale


def dequantized(data: Tensor, scale: Tensor) -> Tensor:
    if data.dim() == 3:
        return torch.stack([dequantized(*pair) for pair in zip(data, scale, strict=True)])
    whole = scale.reshape(-1).expand(len(data)) if scale.numel() in (1, len(data)) else scale
    return fp8.dequantize(data, whole, torch.float32)
