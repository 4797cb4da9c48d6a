"""Reads rotary position embeddings from `rope_theta`, `rope_scaling`, `rope_parameters` and other keys of a config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .attention import FULL, SLIDING
from .errors import InvalidModelConfig, UnsupportedModel
from .keys import Keys
from .rope import (
    DEFAULT_THETA,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    QueryGrowth,
    Rope,
    YarnRope,
)


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `rope_scaling`, or else `rope_parameters` (transformers 5), of a config. Raises `InvalidModelConfig`.

    If both are given, only `rope_scaling` counts, as in transformers.
    """
    return _object(config, "rope_scaling" if config.get("rope_scaling") else "rope_parameters")


def no_rotated_layers(keys: Keys, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Return the `ConfigRules.rotated_layers` of a model in which no layer rotates queries and keys."""
    return (False,) * len(windows)


def read_rope(config: Mapping[str, Any], max_positions: int, *, partly_rotated: bool = False) -> Rope:
    """Read the rope of a Hugging Face config: `rope_theta`, and what `rope_parameters` returns.

    `max_positions` is the config's `max_position_embeddings`. `partly_rotated` allows a `partial_rotary_factor`.
    Raises `ModelError`.
    """
    keys = {key: value for key, value in rope_parameters(config).items() if value is not None}
    keys.setdefault("rope_theta", config.get("rope_theta") or DEFAULT_THETA)
    kind = keys.get("rope_type", keys.get("type", "default"))
    if kind in ("su", "yarn") and "long_factor" in keys:  # earlier names of longrope
        kind = "longrope"
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
    `rope_scaling`, and `rope_local_base_freq` (by default `rope_theta`). `partly_rotated`: see `read_rope`. Raises
    `ModelError`.
    """
    rest = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    by_kind = _object(config, "rope_parameters")
    if set(by_kind) - {FULL, SLIDING}:
        raise InvalidModelConfig(
            f"config.json: 'rope_parameters' must have those of {FULL} and of {SLIDING}, not {', '.join(by_kind)}"
        )
    full = {**_object(by_kind, FULL), **_object(config, "rope_scaling")}
    theta = _number(config, "rope_theta", DEFAULT_THETA)
    windowed = {**rest, "rope_theta": _number(config, "rope_local_base_freq", theta)}
    return (
        read_rope({**rest, "rope_parameters": full}, max_positions, partly_rotated=partly_rotated),
        read_rope(
            {**windowed, "rope_parameters": _object(by_kind, SLIDING)}, max_positions, partly_rotated=partly_rotated
        ),
    )


def read_query_growth(config: Mapping[str, Any]) -> QueryGrowth | None:
    """Read `llama_4_scaling_beta` of a rope; None without it. Raises `InvalidModelConfig`."""
    keys = rope_parameters(config)
    if keys.get("llama_4_scaling_beta") is None:
        return None
    every = _number(keys, "original_max_position_embeddings")
    return QueryGrowth(_number(keys, "llama_4_scaling_beta"), int(every))


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise InvalidModelConfig(f"config.json: {name!r} must be an object, not {value!r}")
    return value


def read_rotary_fraction(config: Mapping[str, Any], default: float) -> float:
    """Return the fraction of a head's dimensions that are rotated. Raises `InvalidModelConfig`."""
    ropes = rope_parameters(config)
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


def _read_longrope(keys: Mapping[str, Any], max_positions: int) -> Rope:
    original = int(_number(keys, "original_max_position_embeddings"))
    factor = _number(keys, "factor", max_positions / original)
    growth = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRope(
        _number(keys, "rope_theta"),
        _factors(keys, "short_factor"),
        _factors(keys, "long_factor"),
        original,
        _number(keys, "attention_factor", growth),
    )


def _factors(keys: Mapping[str, Any], name: str) -> tuple[float, ...]:
    given = keys.get(name)
    if not isinstance(given, list) or not given:
        raise InvalidModelConfig(f"config.json: rope parameter {name!r} must be a list of numbers, not {given!r}")
    return tuple(_number({name: each}, name) for each in given)


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
    "longrope": _read_longrope,
    "mrope": _read_default,  # positions in time, height and width, which are equal for text
    "proportional": _read_proportional,
    "yarn": _read_yarn,
}
