"""Rotary position embeddings as a checkpoint describes them. `layers.rotary` turns them into angles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .attention import FULL, SLIDING
from .errors import InvalidModelConfig, UnsupportedModel

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


def read_rope(config: Mapping[str, Any], max_positions: int, *, partly_rotated: bool = False) -> Rope:
    """Read the rope of a Hugging Face config: `rope_theta` and `rope_scaling`, or `rope_parameters` (transformers 5).

    `max_positions` is the config's `max_position_embeddings`. `partly_rotated` allows a `partial_rotary_factor`.
    Raises `ModelError`.
    """
    given = _object(config, "rope_scaling" if config.get("rope_scaling") else "rope_parameters")
    keys = {key: value for key, value in given.items() if value is not None}
    keys.setdefault("rope_theta", config.get("rope_theta") or DEFAULT_THETA)
    kind = keys.get("rope_type", keys.get("type", "default"))
    _refuse_what_no_layer_computes(config, keys, partly_rotated or kind == "proportional")
    # The key outside the rope's parameters wins over the one among them, as in transformers.
    original = config.get("original_max_position_embeddings") or keys.get("original_max_position_embeddings")
    keys["original_max_position_embeddings"] = original or max_positions
    if not isinstance(kind, str) or kind not in _READERS:
        raise UnsupportedModel(f"config.json: rope_type {kind!r} is not supported; supported are {', '.join(_READERS)}")
    return _READERS[kind](keys, max_positions)


def read_ropes_by_window(
    config: Mapping[str, Any], max_positions: int, *, partly_rotated: bool = False
) -> tuple[Rope, Rope]:
    """Read the ropes of layers without and with a window, for families in which they differ.

    They are `rope_parameters.full_attention` and `.sliding_attention` (transformers 5), or `rope_theta` with
    `rope_scaling`, and `rope_local_base_freq`. `partly_rotated`: see `read_rope`. Raises `ModelError`.
    """
    rest = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    by_kind = _object(config, "rope_parameters")
    if set(by_kind) - {FULL, SLIDING}:
        raise InvalidModelConfig(
            f"config.json: 'rope_parameters' must have those of {FULL} and of {SLIDING}, not {', '.join(by_kind)}"
        )
    full = {**_object(by_kind, FULL), **_object(config, "rope_scaling")}
    windowed = {**rest, "rope_theta": _number(config, "rope_local_base_freq", DEFAULT_THETA)}
    return (
        read_rope({**rest, "rope_parameters": full}, max_positions, partly_rotated=partly_rotated),
        read_rope(
            {**windowed, "rope_parameters": _object(by_kind, SLIDING)}, max_positions, partly_rotated=partly_rotated
        ),
    )


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise InvalidModelConfig(f"config.json: {name!r} must be an object, not {value!r}")
    return value


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


def read_rotary_fraction(config: Mapping[str, Any], default: float) -> float:
    """Return the fraction of a head's dimensions that are rotated. Raises `InvalidModelConfig`."""
    ropes = {**_object(config, "rope_parameters"), **_object(config, "rope_scaling")}
    kinds = [ropes[kind] for kind in (FULL, SLIDING) if isinstance(ropes.get(kind), Mapping)]
    given = {kind.get("partial_rotary_factor") for kind in kinds}
    if len(given) > 1:
        raise UnsupportedModel("config.json: a partial_rotary_factor for each kind of layer is not supported, only one")
    of_kinds = given.pop() if given else None
    fraction = ropes.get("partial_rotary_factor", of_kinds)
    if fraction is None:
        fraction = config.get("partial_rotary_factor")
    if fraction is None:
        return default
    if not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise InvalidModelConfig(f"config.json: partial_rotary_factor must be above 0 and at most 1, not {fraction!r}")
    return float(fraction)


def _refuse_what_no_layer_computes(config: Mapping[str, Any], keys: Mapping[str, Any], partly_rotated: bool) -> None:
    fraction = keys.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if fraction not in (None, 1, 1.0) and not partly_rotated:
        raise UnsupportedModel(f"config.json: partial_rotary_factor {fraction} is not supported, only 1.0")
    nested = sorted(key for key, value in keys.items() if isinstance(value, Mapping))
    if nested:
        raise UnsupportedModel(f"config.json: rope parameters of their own for {', '.join(nested)} are not supported")


def _number(keys: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = keys.get(name, default)
    if value is None:
        raise InvalidModelConfig(
            f"config.json: rope parameters of type {keys.get('rope_type', keys.get('type'))!r} need {name!r}"
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InvalidModelConfig(f"config.json: rope parameter {name!r} must be a positive number, not {value!r}")
    return float(value)


def _read_default(keys: Mapping[str, Any], max_positions: int) -> Rope:
    return Rope(_number(keys, "rope_theta"))


def _read_linear(keys: Mapping[str, Any], max_positions: int) -> Rope:
    return LinearRope(_number(keys, "rope_theta"), _number(keys, "factor"))


def _read_dynamic(keys: Mapping[str, Any], max_positions: int) -> Rope:
    return DynamicRope(_number(keys, "rope_theta"), _number(keys, "factor"), max_positions)


def _read_proportional(keys: Mapping[str, Any], max_positions: int) -> Rope:
    fraction = _number(keys, "partial_rotary_factor", 1.0)
    if fraction > 1:
        raise InvalidModelConfig(f"config.json: partial_rotary_factor must be at most 1, not {fraction:g}")
    return ProportionalRope(_number(keys, "rope_theta"), fraction, _number(keys, "factor", 1.0))


def _read_llama3(keys: Mapping[str, Any], max_positions: int) -> Rope:
    return Llama3Rope(
        _number(keys, "rope_theta"),
        _number(keys, "factor"),
        _number(keys, "low_freq_factor"),
        _number(keys, "high_freq_factor"),
        int(_number(keys, "original_max_position_embeddings")),
    )


def _read_yarn(keys: Mapping[str, Any], max_positions: int) -> Rope:
    original = int(_number(keys, "original_max_position_embeddings"))
    factor = _number(keys, "factor", max_positions / original)
    return YarnRope(
        _number(keys, "rope_theta"),
        factor,
        original,
        _yarn_attention_factor(keys, factor),
        _number(keys, "beta_fast", 32.0),
        _number(keys, "beta_slow", 1.0),
        _truncates(keys),
        _number(keys, "mscale_all_dim") if keys.get("mscale_all_dim") else 0.0,
    )


def _truncates(keys: Mapping[str, Any]) -> bool:
    value = keys.get("truncate", True)
    if not isinstance(value, bool):
        raise InvalidModelConfig(f"config.json: rope parameter 'truncate' must be true or false, not {value!r}")
    return value


def _yarn_attention_factor(keys: Mapping[str, Any], factor: float) -> float:
    if "attention_factor" in keys:
        return _number(keys, "attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if keys.get("mscale") and keys.get("mscale_all_dim"):
        return scale(_number(keys, "mscale")) / scale(_number(keys, "mscale_all_dim"))
    return scale(1.0)


_READERS = {
    "default": _read_default,
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "llama3": _read_llama3,
    "proportional": _read_proportional,
    "yarn": _read_yarn,
}
