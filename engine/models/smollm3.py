"""SmolLM3."""

from __future__ import annotations

from baton.engine.hf_config.attention import FULL, SLIDING, WindowRule
from baton.engine.hf_config.errors import InvalidModelConfig
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import keys_and_values

from . import Family
from .llama import LlamaLayer


class SmolLM3Layer(LlamaLayer):
    """The layer of Llama; every fourth does not rotate queries and keys (arXiv:2501.18795)."""


def read_rotations(keys: Keys, num_layers: int) -> tuple[bool, ...]:
    """Return which layers rotate. `no_rope_layers` has 1 for a layer that does."""
    given, every = keys.values.get("no_rope_layers"), keys.integer("no_rope_layer_interval", 4)
    if given is None:
        return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    if not isinstance(given, list) or len(given) != num_layers or any(flag not in (0, 1) for flag in given):
        raise InvalidModelConfig(
            f"config.json: 'no_rope_layers' must be a list of {num_layers} times 0 or 1, not {given!r}"
        )
    return tuple(flag == 1 for flag in given)


def read_rotated_layers(keys: Keys, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    return read_rotations(keys, len(windows))


def read_kinds(keys: Keys, num_layers: int) -> list[str]:
    """Return the kinds of layers of a model with windows: those that do not rotate have one."""
    return [FULL if rotates else SLIDING for rotates in read_rotations(keys, num_layers)]


FAMILY = Family(
    architecture="SmolLM3ForCausalLM",
    layer=SmolLM3Layer,
    cache=keys_and_values,
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    windows=WindowRule(switched=True, listed=True, kinds=read_kinds),
    rotated_layers=read_rotated_layers,
)
