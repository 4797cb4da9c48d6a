"""Weights in 8 bits, as config.json describes them.

    quant_method "fp8"                 DeepSeek-V3, Qwen3-FP8: a scale a block of 128 x 128, or of the whole weight
    quant_method "compressed-tensors"  what llm-compressor writes: a scale a row, a block, or of the whole weight
    quant_method "modelopt"            what NVIDIA's Model Optimizer writes as "FP8": a scale of the whole weight

Inputs are brought to 8 bits as they come, whatever the checkpoint says: scales that were measured for them go unread.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from .errors import InvalidModelConfig, UnsupportedModel
from .keys import NEWER, Keys

BLOCK = [128, 128]  # rows and columns of a weight that share a scale
_EXPERTS_GATES = r"re:.*\.gate$"  # routers are small and are never quantized
_TMA_BYTES = 16  # rows of a matrix begin at multiples of these, where a GPU copies it by blocks


@dataclass(frozen=True)
class Quantization:
    """Linear layers whose weights are E4M3, value = stored * scale."""

    in_blocks: bool  # a scale a block of 128 x 128; otherwise a row, or all rows the same
    scale_name: str  # of the tensor with a layer's scales, beside its `weight`
    # Names of layers, or of what they are part of, that are as ever; "re:..." an expression, with "*" a pattern.
    ignored: tuple[str, ...]
    whole: bool = field(default=False, metadata=NEWER)  # whether each weight has one scale

    @property
    def weight_bytes(self) -> float:
        """Bytes of memory for each value of a weight that stays in 8 bits, with its part of a scale of 4 bytes."""
        rows, columns = BLOCK
        return 1 + 4 / (rows * columns)

    def keeps_experts(self, hidden_size: int, *borders: int) -> bool:
        """Return whether experts can stay in 8 bits whose widths are cut at these `borders`: only between blocks.

        One scale of a whole matrix becomes that of all blocks of any rank's stretch.
        """
        if self.in_blocks:
            return self.keeps_linear(hidden_size, *borders)
        return self.whole and all(border % _TMA_BYTES == 0 for border in (hidden_size, *borders))

    def keeps_linear(self, *borders: float) -> bool:
        """Return whether a matrix can stay in 8 bits that is cut at these rows and columns: only between blocks."""
        return not self.in_blocks or all(border % BLOCK[0] == 0 for border in borders)

    def scale_of(self, weight: str) -> str:
        """Return the name of the tensor with the scales of the tensor `weight`: `x.weight`, or a stack of matrices."""
        if weight.endswith("weight"):
            return f"{weight.removesuffix('weight')}{self.scale_name}"
        return f"{weight}_{self.scale_name.removeprefix('weight_')}"

    @property
    def unread(self) -> tuple[str, ...]:
        """Patterns of tensors that a checkpoint may hold beside weights and scales."""
        return ("*.input_scale", "*.activation_scale")

    def covers(self, layer: str) -> bool:
        """Return whether the linear layer of this name is quantized. The checkpoint's own tensors go before this."""
        return not any(_is_named(layer, pattern) for pattern in (*self.ignored, "lm_head", _EXPERTS_GATES))


class _Fp8(msgspec.Struct):
    """The keys of a config about weights in "fp8" that are read."""

    fmt: str | None = None
    weight_block_size: list[int] | str | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None


class _Scheme(msgspec.Struct):
    type: str | None = None
    num_bits: int | None = None
    strategy: str | None = None
    block_structure: list[int] | str | None = None


class _Schemes(msgspec.Struct):
    weights: _Scheme | None = None
    input_activations: _Scheme | None = None


class _CompressedTensors(msgspec.Struct):
    format: str | None = None
    config_groups: dict[str, _Schemes] | None = None
    ignore: list[str] | None = None


class _ModelOpt(msgspec.Struct):
    quant_algo: str | None = None
    ignore: list[str] | None = None
    exclude_modules: list[str] | None = None


_Described = TypeVar("_Described", _Fp8, _CompressedTensors, _ModelOpt)


def read_quantization(keys: Keys, tensors: Iterable[str] = ()) -> Quantization | None:
    """Return the quantization, None for plain weights. `tensors` are the checkpoint's names, where there is one.

    Raises `InvalidModelConfig`, and `UnsupportedModel` for any other quantization.
    """
    described = keys.values.get("quantization_config")
    if not described:
        return None
    method = described.get("quant_method") if isinstance(described, dict) else described
    if method == "fp8":
        return _read_fp8(_read(described, _Fp8), tensors)
    if method == "compressed-tensors":
        return _read_compressed_tensors(_read(described, _CompressedTensors))
    if method == "modelopt":
        return _read_modelopt(_read(described, _ModelOpt))
    if method == "mxfp4":  # of experts only, which are multiplied out as they come (`layers.mxfp4`)
        return None
    raise _unsupported(f"quant_method {method!r}")


def _read(described: Any, kind: type[_Described]) -> _Described:
    try:
        return msgspec.convert(described, kind)
    except msgspec.ValidationError as error:
        raise InvalidModelConfig(f"config.json: 'quantization_config': {error}") from None


def _read_fp8(described: _Fp8, tensors: Iterable[str]) -> Quantization:
    if described.fmt not in (None, "e4m3", "float8_e4m3fn"):
        raise _unsupported(f"fmt {described.fmt!r} of fp8 weights")
    block = described.weight_block_size
    _refuse_text("weight_block_size", block)
    if block not in (None, BLOCK):
        raise _unsupported(f"weight_block_size {block}")
    inverse = block is not None or any(name.endswith(".weight_scale_inv") for name in tensors)
    ignored = described.modules_to_not_convert or described.ignored_layers or ()
    name = "weight_scale_inv" if inverse else "weight_scale"
    return Quantization(block is not None, name, tuple(ignored), whole=block is None)


def _read_compressed_tensors(described: _CompressedTensors) -> Quantization:
    groups = list((described.config_groups or {}).values())
    if described.format not in ("float-quantized", "naive-quantized") or len(groups) != 1:
        raise _unsupported(f"format {described.format!r} of compressed-tensors in {len(groups)} config_groups")
    weights, inputs = groups[0].weights or _Scheme(), groups[0].input_activations or _Scheme()
    for what, scheme in (("weights", weights), ("input_activations", inputs)):
        if (scheme.type, scheme.num_bits) != ("float", 8):
            raise _unsupported(f"{what} of type {scheme.type!r} with num_bits {scheme.num_bits}")
    if weights.strategy not in ("tensor", "channel", "block"):
        raise _unsupported(f"strategy {weights.strategy!r} of weights")
    in_blocks = weights.strategy == "block"
    _refuse_text("block_structure", weights.block_structure)
    if in_blocks and weights.block_structure != BLOCK:
        raise _unsupported(f"block_structure {weights.block_structure} of weights")
    return Quantization(in_blocks, "weight_scale", tuple(described.ignore or ()), whole=weights.strategy == "tensor")


def _read_modelopt(described: _ModelOpt) -> Quantization | None:
    """Read the keys of config.json, or those of `quantization` in hf_quant_config.json."""
    if described.quant_algo is None:  # it is about the cache alone
        return None
    if described.quant_algo != "FP8":
        raise _unsupported(f"quant_algo {described.quant_algo!r} of modelopt")
    ignored = described.ignore or described.exclude_modules or ()
    return Quantization(False, "weight_scale", tuple(ignored), whole=True)


def _refuse_text(name: str, given: list[int] | str | None) -> None:
    if isinstance(given, str):
        raise InvalidModelConfig(
            f"config.json: 'quantization_config': {name} must be a list of rows and columns such as {BLOCK}, not the "
            f"text {given!r}"
        )


def _is_named(layer: str, pattern: str) -> bool:
    """`pattern` is the layer's name, its beginning or its end, at a dot; a regular expression behind "re:"; or has "*"
    for any letters.
    """
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), layer) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(layer, pattern)
    return f".{pattern}." in f".{layer}."


def _unsupported(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"config.json: 'quantization_config': {what} is not supported; supported are plain weights, experts in MXFP4, "
        "and E4M3 with scales of blocks of 128 x 128, of rows or of whole weights"
    )
