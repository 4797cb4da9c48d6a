"""What config.json says of weights in 8 bits.

    quant_method "fp8"                 DeepSeek-V3, Qwen3-FP8: a scale a block of 128 x 128, or of the whole weight
    quant_method "compressed-tensors"  what llm-compressor writes: a scale a row, a block, or of the whole weight

Inputs are brought to 8 bits as they come, whatever the checkpoint says: scales that were measured for them go unread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import UnsupportedModel
from .keys import Keys

BLOCK = [128, 128]  # rows and columns of a weight that share a scale
_EXPERTS_GATES = r"re:.*\.gate$"  # routers are small and are never quantized


@dataclass(frozen=True)
class Quantization:
    """Linear layers whose weights are E4M3, value = stored * scale."""

    in_blocks: bool  # a scale a block of 128 x 128; otherwise a row, or all rows the same
    scale_name: str  # of the tensor with a layer's scales, beside its `weight`
    ignored: tuple[str, ...]  # names of layers, or of what they are part of, that are as ever; "re:..." a pattern

    def scale_of(self, weight: str) -> str:
        """The name of the tensor with the scales of the tensor `weight`."""
        return f"{weight.removesuffix('weight')}{self.scale_name}"

    @property
    def unread(self) -> tuple[str, ...]:
        """Patterns of tensors that a checkpoint may hold beside weights and scales."""
        return ("*.input_scale", "*.activation_scale")

    def covers(self, layer: str) -> bool:
        """Whether the linear layer of this name is quantized. What a checkpoint holds goes before this."""
        return not any(_is_named(layer, pattern) for pattern in (*self.ignored, "lm_head", _EXPERTS_GATES))


def read_quantization(keys: Keys, tensors: Iterable[str] = ()) -> Quantization | None:
    """None for plain weights. `tensors` are the checkpoint's names, where there is one.

    Raises `UnsupportedModel` for any other quantization.
    """
    described = keys.values.get("quantization_config")
    if not described:
        return None
    method = described.get("quant_method") if isinstance(described, dict) else described
    if method == "fp8":
        return _read_fp8(described, tensors)
    if method == "compressed-tensors":
        return _read_compressed_tensors(described)
    if method == "mxfp4":  # of experts only, which are multiplied out as they come (`layers.mxfp4`)
        return None
    raise _unsupported(f"weights quantized by {method!r}")


def _read_fp8(described: Mapping[str, Any], tensors: Iterable[str]) -> Quantization:
    if described.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise _unsupported(f"fp8 weights as {described['fmt']!r}")
    block = described.get("weight_block_size")
    if block not in (None, BLOCK):
        raise _unsupported(f"fp8 weights with a scale for {block} values")
    inverse = block is not None or any(name.endswith(".weight_scale_inv") for name in tensors)
    ignored = described.get("modules_to_not_convert") or described.get("ignored_layers") or ()
    return Quantization(block is not None, "weight_scale_inv" if inverse else "weight_scale", tuple(ignored))


def _read_compressed_tensors(described: Mapping[str, Any]) -> Quantization:
    groups = list((described.get("config_groups") or {}).values())
    if described.get("format") not in ("float-quantized", "naive-quantized") or len(groups) != 1:
        raise _unsupported(f"compressed-tensors of format {described.get('format')!r} in {len(groups)} groups")
    weights, inputs = (groups[0].get(what) or {} for what in ("weights", "input_activations"))
    for what, scheme in (("weights", weights), ("input_activations", inputs)):
        if (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
            raise _unsupported(f"compressed-tensors with {what} of {scheme.get('num_bits')} bits {scheme.get('type')}")
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block") or (strategy == "block" and weights["block_structure"] != BLOCK):
        raise _unsupported(f"compressed-tensors with a scale a {strategy}")
    return Quantization(strategy == "block", "weight_scale", tuple(described.get("ignore") or ()))


def _is_named(layer: str, pattern: str) -> bool:
    """`pattern` is the layer's name, its beginning or its end, at a dot; or a regular expression behind "re:"."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), layer) is not None
    return f".{pattern}." in f".{layer}."


def _unsupported(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"config.json: {what} are not supported; supported are plain weights, experts in MXFP4, and E4M3 with scales "
        "of blocks of 128 x 128, of rows or of whole weights"
    )
