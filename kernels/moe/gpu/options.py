"""Launch options of the expert kernels: measured ones (`baton.kernels.tuned`), with defaults for the rest."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass

import torch

from baton.kernels import tuned
from baton.kernels.launch import next_power_of_2
from baton.kernels.moe.experts import ExpertWeights

MOST_FEW_PAIRS = 32  # up to so many (token, expert) pairs, each has its own programs (`gemv`)


@dataclass(frozen=True)
class MoeShape:
    """The shape that the best options depend on. The number of tokens is rounded up to a power of two.

    So a process that has launched every power of two has compiled everything that it will launch.
    """

    num_tokens: int
    num_experts: int
    top_k: int
    hidden_size: int
    width: int  # of an expert
    in_8_bits: bool = False

    @classmethod
    def of(cls, experts: ExpertWeights, expert_ids: torch.Tensor) -> MoeShape:
        num_tokens, top_k = expert_ids.shape
        tokens = next_power_of_2(num_tokens)
        return cls(tokens, experts.num_experts, top_k, experts.hidden_size, experts.width, experts.in_8_bits)

    @property
    def is_few(self) -> bool:
        return self.num_tokens * self.top_k <= MOST_FEW_PAIRS


@dataclass(frozen=True)
class GemvOptions:
    """Options of the kernels that serve few tokens."""

    gate_up_columns: int = 4
    gate_up_depth: int = 1024
    gate_up_warps: int = 4
    down_columns: int = 2
    down_depth: int = 256
    down_warps: int = 4


@dataclass(frozen=True)
class ProductOptions:
    """Options of one grouped product."""

    block_columns: int
    block_depth: int  # for 2-byte values; 4-byte values use half of it, so that blocks need the same memory
    warps: int
    stages: int

    def meta(self, value_bytes: int) -> dict[str, int]:
        return {
            "BLOCK_COLUMNS": self.block_columns,
            "BLOCK_DEPTH": self.block_depth * 2 // value_bytes,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


@dataclass(frozen=True)
class GroupedOptions:
    """Options of both grouped products, which share their tiles.

    A tile with at most `short_rows` rows is computed with that height. If tokens agree on a few experts, these have
    tall tiles; otherwise nearly all tiles are short.
    """

    block_rows: int
    short_rows: int  # block_rows: all tiles are multiplied alike
    gate_up: ProductOptions
    down: ProductOptions

    def flat(self) -> dict[str, int]:
        parts = {"gate_up": asdict(self.gate_up), "down": asdict(self.down)}
        named = {f"{part}_{name}": value for part, options in parts.items() for name, value in options.items()}
        return {"block_rows": self.block_rows, "short_rows": self.short_rows, **named}

    @classmethod
    def from_flat(cls, flat: dict[str, int]) -> GroupedOptions:
        def part(name: str) -> ProductOptions:
            return ProductOptions(**{key.removeprefix(name): v for key, v in flat.items() if key.startswith(name)})

        return cls(flat["block_rows"], flat["short_rows"], part("gate_up_"), part("down_"))


@functools.cache
def gemv_options(shape: MoeShape, device: torch.device) -> GemvOptions:
    return GemvOptions(**tuned.config("moe", device, tuning_key("few", shape), default=asdict(GemvOptions())))


@functools.cache
def grouped_options(shape: MoeShape, device: torch.device) -> GroupedOptions:
    default = default_grouped(shape).flat()
    return GroupedOptions.from_flat(tuned.config("moe", device, tuning_key("grouped", shape), default))


def tuning_key(kernels: str, shape: MoeShape) -> dict[str, int | str]:
    numbers = asdict(shape)
    in_8_bits = numbers.pop("in_8_bits")
    return {"kernels": f"{kernels}, 8 bits" if in_8_bits else kernels, **numbers}


def default_grouped(shape: MoeShape) -> GroupedOptions:
    """Return options with tiles about as tall as an expert's average number of rows.

    Shorter tiles would read weights several times, taller ones compute padding.
    """
    rows_per_expert = shape.num_tokens * shape.top_k / shape.num_experts
    for block_rows in (16, 32):
        if rows_per_expert <= block_rows * 0.75:
            few_rows = ProductOptions(block_columns=128, block_depth=128, warps=4, stages=5 if shape.in_8_bits else 3)
            return GroupedOptions(block_rows, block_rows, few_rows, few_rows)
    if shape.in_8_bits:
        many_rows = ProductOptions(block_columns=128, block_depth=128, warps=8, stages=3)
    else:
        many_rows = ProductOptions(block_columns=256, block_depth=64, warps=8, stages=4)
    block_rows = 128 if rows_per_expert > 48 else 64
    return GroupedOptions(block_rows, block_rows, many_rows, many_rows)
