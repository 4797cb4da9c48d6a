"""Weights in 8 bits, as config.json describes them.

    quant_method "fp8"                 DeepSeek-V3, Qwen3-FP8: a scale per block of 128 x 128, or per weight
    quant_method "compressed-tensors"  written by llm-compressor: a scale per row, per block, or per weight
    quant_method "modelopt"            written by NVIDIA's Model Optimizer as "FP8": a scale per weight

Activations are always quantized dynamically: the checkpoint's static scales of activations are not loaded.
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
_TMA_BYTES = 16  # TMA, which copies blocks of a matrix on a GPU, needs rows that begin at multiples of this


@dataclass(frozen=True)
class Quantization:
    """FP8 weights of linear layers: E4M3 codes, value = stored * scale."""

    in_blocks: bool  # true: a scale per block of 128 x 128; false: per row, or one for all rows
    scale_name: str  # name of the tensor with a layer's scales, next to its `weight`
    # Layers that are not quantized: parts of their names, regular expressions ("re:..."), or patterns (with "*").
    ignored: tuple[str, ...]
    whole: bool = field(default=False, metadata=NEWER)  # whether each weight has a single scale

    @property
    def weight_bytes(self) -> float:
        """Bytes of memory per value of an 8-bit weight, including its part of a block's 4-byte scale."""
        rows, columns = BLOCK
        return 1 + 4 / (rows * columns)

    def keeps_experts(self, hidden_size: int, *borders: int) -> bool:
        """Return whether experts can stay in 8 bits if their widths are cut at these `borders` between ranks.

        Blocks of scales must not be cut. A single scale per matrix allows more borders: each rank's part gets its own
        blocks, all with that scale.
        """
        if self.in_blocks:
            return self.keeps_linear(hidden_size, *borders)
        return self.whole and all(border % _TMA_BYTES == 0 for border in (hidden_size, *borders))

    def keeps_linear(self, *borders: float) -> bool:
        """Return whether a matrix can stay in 8 bits if it is cut at these rows and columns: not within a block."""
        return not self.in_blocks or all(border % BLOCK[0] == 0 for border in borders)

    def scale_of(self, weight: str) -> str:
        """Return the name of the scales of tensor `weight`, which is `x.weight` or a stack of matrices."""
        if weight.endswith("weight"):
            return f"{weight.removesuffix('weight')}{self.scale_name}"
        return f"{weight}_{self.scale_name.removeprefix('weight_')}"

    @property
    def unread(self) -> tuple[str, ...]:
        """Patterns of other tensors that a checkpoint may contain, and that are not loaded: scales of activations."""
        return ("*.input_scale", "*.activation_scale")

    def covers(self, layer: str) -> bool:
        """Return whether the config says that this linear layer is quantized. With a checkpoint, its dtypes decide."""
        return not any(_is_named(layer, pattern) for pattern in (*self.ignored, "lm_head", _EXPERTS_GATES))


class _Fp8(msgspec.Struct):
    """The keys of quant_method "fp8" that Baton reads."""

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
    """Return the quantization; None for plain weights. `tensors` are the checkpoint's tensor names, if there is one.

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
    if method == "mxfp4":  # only experts are quantized, and are dequantized while loading (`layers.mxfp4`)
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
    """Read the quantization from config.json, or from `quantization` in hf_quant_config.json."""
    if described.quant_algo is None:  # only the KV cache is quantized
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
    """Return whether `pattern` matches the layer's name.

    A pattern is the name, or its beginning or end at a dot; a regular expression after "re:"; or has "*" as wildcard.
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
