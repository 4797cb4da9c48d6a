"""Angles of rotary position embeddings.

Frequencies are computed in float32 by the same operations as in `transformers`: at position 100 000, a difference in
the last bit of a frequency changes the angle by a third of a degree.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from baton.engine.hf_config.rope import (
    LinearRope,
    Llama3Rope,
    NoRope,
    ProportionalRope,
    QueryGrowth,
    Rope,
    Rotation,
    ScaledRope,
    YarnRope,
)


def cos_sin_table(rotation: Rotation, num_positions: int, device: torch.device | str = "cpu") -> Tensor:
    """Return [num_positions, 2 n] float32: the cosines of a position's n angles, then their sines.

    n is half of the rotated dimensions, or fewer if the rope rotates only the first pairs of them.
    """
    rope, dim = rotation.rope, rotation.dim
    turning = _turning(rope, dim) if isinstance(rope, ProportionalRope) else dim // 2
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies(rope, dim)[:turning]
    scale = rope.attention_factor if isinstance(rope, ScaledRope | YarnRope) else 1.0
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1).to(device)


def query_factors(growth: QueryGrowth, num_positions: int) -> Tensor:
    """Return the factors of queries [num_positions] float32."""
    return 1 + growth.beta * torch.log1p(torch.arange(num_positions) // growth.every)


@functools.singledispatch
def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the frequencies [head_dim / 2] float32, in radians per position."""
    return 1.0 / _wavelengths(rope, head_dim)


@frequencies.register
def _(rope: NoRope, head_dim: int) -> Tensor:
    return torch.zeros(head_dim // 2)


@frequencies.register
def _(rope: LinearRope, head_dim: int) -> Tensor:
    return 1.0 / _wavelengths(rope, head_dim) / rope.factor


@frequencies.register
def _(rope: ScaledRope, head_dim: int) -> Tensor:
    return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32) * _wavelengths(rope, head_dim))


@frequencies.register
def _(rope: ProportionalRope, head_dim: int) -> Tensor:
    turning = _turning(rope, head_dim)
    still = torch.zeros(head_dim // 2 - turning)
    return torch.cat([1.0 / _wavelengths(rope, head_dim)[:turning], still]) / rope.factor


def _turning(rope: ProportionalRope, head_dim: int) -> int:
    """Return the number of dimension pairs that are rotated."""
    return int(rope.fraction * head_dim // 2)


@frequencies.register
def _(rope: Llama3Rope, head_dim: int) -> Tensor:
    plain = 1.0 / _wavelengths(rope, head_dim)
    slowed = plain / rope.factor
    turns = rope.original_max_positions / (2 * math.pi / plain)  # full turns over the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - keep) * plain / rope.factor + keep * plain
    return torch.where(turns < rope.low_freq_factor, slowed, torch.where(turns > rope.high_freq_factor, plain, blended))


@frequencies.register
def _(rope: YarnRope, head_dim: int) -> Tensor:
    wavelengths = _wavelengths(rope, head_dim)
    interpolated, extrapolated = 1.0 / (rope.factor * wavelengths), 1.0 / wavelengths
    low, high = _yarn_ramp(rope, head_dim)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return interpolated * (1 - keep) + extrapolated * keep


def _wavelengths(rope: Rope, head_dim: int) -> Tensor:
    """Return the wavelengths in positions, divided by 2 pi: theta ** (2i / head_dim)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    powers: Tensor = rope.theta**exponents
    return powers


def _yarn_ramp(rope: YarnRope, head_dim: int) -> tuple[float, float]:
    """Return the dimension pairs that turn `beta_fast` and `beta_slow` times in the original context (section 3.2)."""

    def pair(turns: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001
