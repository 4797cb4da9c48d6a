"""Kinds of rotary position embeddings. `rope_reader` reads them from a config, `layers.rotary` makes them angles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .errors import InvalidModelConfig

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True)
class Rope:
    """Plain rope: dimension pair i of n turns by theta ** (-i / n) per position (Su et al., arXiv:2104.09864)."""

    theta: float

    def at_length(self, num_positions: int, rotary_dim: int) -> Rope:
        """Return the rope to use if the model serves sequences of up to `num_positions` tokens."""
        return self


@dataclass(frozen=True)
class NoRope(Rope):
    """No rotation: every angle is 0. Kernels rotate only `most_dims` dimensions, for a small table of angles."""

    theta: float = DEFAULT_THETA
    most_dims: ClassVar[int] = 16  # two loads of 16 bytes in bfloat16


NO_ROPE = NoRope()


@dataclass(frozen=True)
class LinearRope(Rope):
    """Positions divided by `factor` (Chen et al., arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class DynamicRope(Rope):
    """Plain up to the original context; theta grows with the length of longer sequences ("NTK-aware").

    Cached keys cannot be rotated again when a sequence grows. So `at_length` fixes one theta for all sequences.
    """

    factor: float
    original_max_positions: int

    def at_length(self, num_positions: int, rotary_dim: int) -> Rope:
        if num_positions <= self.original_max_positions or rotary_dim <= 2:  # a single pair does not depend on theta
            return Rope(self.theta)
        stretch = self.factor * num_positions / self.original_max_positions - (self.factor - 1)
        return Rope(self.theta * stretch ** (rotary_dim / (rotary_dim - 2)))


@dataclass(frozen=True)
class Llama3Rope(Rope):
    """Llama 3.1's rope: slow dimensions are slowed by `factor`, fast ones are unchanged, with a ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ProportionalRope(Rope):
    """Gemma 4's rope: only the first `fraction` of dimension pairs turn, with the frequencies of a plain rope."""

    fraction: float
    factor: float  # divides positions


@dataclass(frozen=True)
class YarnRope(Rope):
    """YaRN: interpolation by parts; cosines and sines times `attention_factor` (Peng et al., arXiv:2309.00071)."""

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool  # whether the ends of the ramp are rounded outwards to whole dimensions
    mscale_all_dim: float = 0.0  # used by models that also scale attention scores: `layers.mla.score_scale`


@dataclass(frozen=True)
class ScaledRope(Rope):
    """Frequencies divided by `factors`, one for each dimension pair; cosines and sines times `attention_factor`."""

    factors: tuple[float, ...]
    attention_factor: float


@dataclass(frozen=True)
class LongRope(Rope):
    """LongRoPE: one list of factors up to the original context, another for longer ones (arXiv:2402.13753).

    Cached keys cannot be rotated again when a sequence grows. So `at_length` chooses one list for all sequences.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float

    def at_length(self, num_positions: int, rotary_dim: int) -> Rope:
        factors = self.long_factors if num_positions > self.original_max_positions else self.short_factors
        if len(factors) != rotary_dim // 2:
            raise InvalidModelConfig(
                f"config.json: longrope must have {rotary_dim // 2} factors, one for each pair of rotated dimensions, "
                f"not {len(factors)}"
            )
        return ScaledRope(self.theta, factors, self.attention_factor)


@dataclass(frozen=True)
class QueryGrowth:
    """Queries grow with their position: times 1 + beta * log(1 + position // every), as in Llama 4 (no rotation)."""

    beta: float
    every: int


@dataclass(frozen=True)
class Rotation:
    """The rotation of a layer's queries and keys."""

    rope: Rope
    dim: int  # number of dimensions of each head that are rotated


def default_positions(rope: Rope, max_positions: int) -> int:
    """Return the default of `max_model_len`. With YaRN, the config may state its positions before scaling."""
    if isinstance(rope, YarnRope):
        return max(max_positions, int(rope.original_max_positions * rope.factor))
    return max_positions


def reachable_positions(rope: Rope, max_positions: int) -> int:
    """Return the largest `max_model_len` that the model allows.

    With linear scaling, some checkpoints state their positions before scaling and some after it. Dynamic scaling
    changes nothing up to the stated positions. In both cases the factor allows more positions, but not by default.
    """
    if isinstance(rope, LinearRope | DynamicRope):
        return max(max_positions, int(max_positions * rope.factor))
    return default_positions(rope, max_positions)
