"""Sliding windows as a checkpoint describes them: which layers see only the newest keys."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidModelConfig, UnsupportedModel
from .keys import Keys

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class WindowRule:
    """The keys that define a family's layers with a `sliding_window`. Other keys are ignored."""

    switched: bool = False  # nowhere, unless `use_sliding_window`
    listed: bool = False  # where `layer_types` names the layer's kind, if that is given
    from_layer: bool = False  # else from layer `max_window_layers` on
    pattern: int | None = (
        None  # else all but every n-th, n being `sliding_window_pattern`, or this where it is left out
    )
    turns: tuple[str, ...] = (SLIDING,)  # else these kinds in turns
    own_rope: bool = False  # these layers have rope parameters of their own, so there must be a window


def read_layer_windows(rule: WindowRule | None, keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    """Return for each layer how many keys a query sees, itself included; None: all. Raises `ModelError`."""
    if rule is None or (keys.values.get("sliding_window") is None and not rule.own_rope):
        return (None,) * num_layers
    if rule.switched and not keys.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = keys.integer("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in _kinds(rule, keys, num_layers))


def _kinds(rule: WindowRule, keys: Keys, num_layers: int) -> list[str]:
    given = keys.values.get("layer_types") if rule.listed else None
    first = (keys.optional_integer("max_window_layers") or 0) if rule.from_layer else 0
    if given is not None:
        return _checked(given, num_layers)
    if rule.pattern is not None:
        pattern = keys.integer("sliding_window_pattern", rule.pattern)
        return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]
    return [FULL if layer < first else rule.turns[layer % len(rule.turns)] for layer in range(num_layers)]


def _checked(kinds: object, num_layers: int) -> list[str]:
    if not isinstance(kinds, list):
        raise InvalidModelConfig(f"config.json: 'layer_types' must be a list, not {kinds!r}")
    unknown = sorted({str(kind) for kind in kinds if kind not in (FULL, SLIDING)})
    if unknown:
        raise UnsupportedModel(f"config.json: layer_types {', '.join(unknown)} are not supported")
    if len(kinds) != num_layers:
        raise InvalidModelConfig(
            f"config.json: layer_types names {len(kinds)} layers, num_hidden_layers is {num_layers}"
        )
    return kinds
