"""Mamba-2 (arXiv:2405.21060) as a config describes it, and the blocks of each layer of a hybrid model.

blocks[layer]     the blocks of a layer, in the order of its forward: ("linear_attention", "mlp"), ("moe",), ...
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import InvalidModelConfig, UnsupportedModel
from .keys import Keys

MAMBA, ATTENTION, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"  # as transformers names them
OLDER_NAMES = {"mamba": MAMBA, "attention": ATTENTION}
NUM_PARTS = 5  # parts of the first projection's output: z, x, B, C and dt

Blocks = tuple[tuple[str, ...], ...]


class MambaNorm(enum.Enum):
    """The order of a mixer's gate, silu(z), and the norm of its result, which is computed for each group of heads.

    NONE            result * gate
    GATE_FIRST      norm(result * gate)
    NORM_FIRST      norm(result) * gate
    """

    NONE = "none"
    GATE_FIRST = "gate first"
    NORM_FIRST = "norm first"


@dataclass(frozen=True, kw_only=True)
class MambaShape:
    """The Mamba-2 mixers of a model, and the blocks of its layers."""

    blocks: Blocks  # blocks of each layer
    num_heads: int
    head_dim: int
    num_groups: int  # groups of heads; the heads of a group share B and C
    state_dim: int
    conv_width: int  # filter width: number of inputs that an output of the convolution depends on
    conv_bias: bool
    projection_bias: bool
    time_step_limits: tuple[float, float]
    norm: str = MambaNorm.GATE_FIRST.value
    multipliers: tuple[float, ...] = (1.0,) * NUM_PARTS  # of z, x, B, C and dt
    output_multiplier: float = 1.0

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_width(self) -> int:
        """The width of B, and of C, for all groups."""
        return self.num_groups * self.state_dim

    @property
    def conv_channels(self) -> int:
        return self.width + 2 * self.group_width

    @property
    def parts(self) -> tuple[int, ...]:
        """The widths of z, x, B, C and dt."""
        return (self.width, self.width, self.group_width, self.group_width, self.num_heads)

    def has(self, layer: int, block: str) -> bool:
        return block in self.blocks[layer]

    def count(self, block: str) -> int:
        """Return how many layers have a block of this kind."""
        return sum(block in blocks for blocks in self.blocks)


@dataclass(frozen=True)
class MambaKeys:
    """The names of a family's config keys. The defaults are those of Bamba and its successors."""

    num_heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    num_groups: str = "mamba_n_groups"
    state_dim: str = "mamba_d_state"
    conv_width: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    projection_bias: str = "mamba_proj_bias"
    expand: str = "mamba_expand"
    width: str | None = None  # key of the width of all heads, in families where it is not `expand` * hidden size


@dataclass(frozen=True)
class MambaDefaults:
    """The sizes that a family has if its config does not say them."""

    num_heads: int = 128
    head_dim: int | None = None  # None: the width of all heads / their number
    num_groups: int = 1
    state_dim: int = 256


def read_mamba(
    keys: Keys,
    blocks: Blocks,
    names: MambaKeys = MambaKeys(),
    defaults: MambaDefaults = MambaDefaults(),
    **given: Any,
) -> MambaShape:
    """Read the mixers of a model whose layers have these `blocks`.

    `given` are fields of `MambaShape` that the family has determined itself. Raises `ModelError`.
    """
    if not any(ATTENTION in each for each in blocks):
        raise UnsupportedModel("config.json: a model without a layer of attention is not supported")
    heads = keys.integer(names.num_heads, defaults.num_heads)
    shape = MambaShape(
        blocks=blocks,
        num_heads=heads,
        head_dim=_head_dim(keys, names, heads, defaults.head_dim),
        num_groups=keys.integer(names.num_groups, defaults.num_groups),
        state_dim=keys.integer(names.state_dim, defaults.state_dim),
        conv_width=keys.integer(names.conv_width, 4),
        conv_bias=keys.flag(names.conv_bias, True),
        projection_bias=keys.flag(names.projection_bias, False),
        time_step_limits=_time_step_limits(keys),
        **given,
    )
    if shape.count(MAMBA):  # else nobody reads its sizes: Granite 4's models with attention alone have some
        _check(shape, names)
        if names.width is not None and shape.width != (width := _width(keys, names)):
            raise InvalidModelConfig(
                f"config.json: {names.num_heads} ({shape.num_heads}) heads of {names.head_dim} ({shape.head_dim}) are "
                f"{shape.width} wide, and {names.width} or {names.expand} say {width}"
            )
    return shape


def _head_dim(keys: Keys, names: MambaKeys, num_heads: int, default: int | None) -> int:
    value = keys.values.get(names.head_dim)
    if value not in (None, "auto") or default is not None:
        return keys.integer(names.head_dim, default)
    return _width(keys, names) // num_heads


def _width(keys: Keys, names: MambaKeys) -> int:
    """Return the width of all heads together, by the keys that say it."""
    whole = None if names.width is None else keys.optional_integer(names.width)
    return keys.integer(names.expand, 2) * keys.integer("hidden_size") if whole is None else whole


def _check(shape: MambaShape, names: MambaKeys) -> None:
    if shape.num_heads % shape.num_groups:
        raise InvalidModelConfig(
            f"config.json: {names.num_heads} ({shape.num_heads}) must be a multiple of "
            f"{names.num_groups} ({shape.num_groups})"
        )
    if not 2 <= shape.conv_width <= 4:
        raise UnsupportedModel(f"config.json: {names.conv_width} {shape.conv_width} is not supported, only 2 to 4")
    head_dim, state_dim = shape.head_dim, shape.state_dim
    if head_dim not in range(16, 129, 16):
        raise UnsupportedModel(
            f"config.json: {names.head_dim} {head_dim} is not supported, only multiples of 16 from 16 to 128"
        )
    if not 16 <= state_dim <= 256 or state_dim & (state_dim - 1):
        raise UnsupportedModel(
            f"config.json: {names.state_dim} {state_dim} is not supported, only powers of two from 16 to 256"
        )


def _time_step_limits(keys: Keys) -> tuple[float, float]:
    given = keys.values.get("time_step_limit")
    if given is None:
        return (0.0, math.inf)
    limits = [_limit(value) for value in given] if isinstance(given, list) else []
    if len(limits) != 2 or not 0.0 <= limits[0] <= limits[1]:
        raise InvalidModelConfig(
            f"config.json: 'time_step_limit' must be two numbers of 0 or more, in order, not {given!r}"
        )
    return (limits[0], limits[1])


def _limit(value: object) -> float:
    """Return a number from JSON. Infinity may be a string, or an object (transformers 5)."""
    if isinstance(value, Mapping):
        value = value.get("__float__")
    if isinstance(value, str) and value.lower() in ("infinity", "inf"):
        return math.inf
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def read_block_types(keys: Keys, known: Sequence[str], num_layers: int | None = None) -> list[str] | None:
    """Return the block type of each layer that the config lists; None without a list. Raises `ModelError`."""
    name = next((name for name in ("layers_block_type", "layer_types") if keys.values.get(name) is not None), None)
    if name is None:
        return None
    given = keys.values[name]
    if not isinstance(given, list) or not all(isinstance(kind, str) for kind in given):
        raise InvalidModelConfig(f"config.json: {name!r} must be a list of names, not {given!r}")
    kinds = [str(OLDER_NAMES.get(kind, kind)) for kind in given]
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise UnsupportedModel(f"config.json: {name} {', '.join(unknown)} are not supported, only {', '.join(known)}")
    if num_layers is not None and len(kinds) != num_layers:
        raise InvalidModelConfig(f"config.json: {name} names {len(kinds)} layers, num_hidden_layers is {num_layers}")
    return kinds
