"""The kinds of attention that a config describes.

form      biases, norms, gates and sinks
heads     KV heads, if layers with a sliding window have other ones than layers with full attention
windows   which layers have a sliding window
latents   multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)
linear    layers with a recurrent state instead of keys and values
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import InvalidModelConfig, UnsupportedModel
from .keys import NEWER, Keys

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True)
class HeadShape:
    """The KV heads of one layer. Keys and values may differ in width."""

    num_kv_heads: int  # of the whole model, not of one tensor-parallel rank
    key_dim: int  # width of keys and of queries
    value_dim: int
    projects_values: bool = field(
        default=True, metadata=NEWER
    )  # false: values are copies of the keys before norm and rotation


class QKNorm(enum.Enum):
    """The RMSNorm of queries and keys before their rotation."""

    HEAD = "head"  # of every head by itself
    WIDTH = "width"  # of all query heads together, and of all key heads


class Sinks(enum.Enum):
    """The layers in which each query head has a learnt extra score in the softmax, without a key or a value."""

    ALL = "all"
    WINDOWS = "windows"  # layers with a window


@dataclass(frozen=True, kw_only=True)
class AttentionForm:
    """The attention layers of a family: their biases, norms, gates and sinks, and how checkpoints store them."""

    qkv_bias: bool | None = None  # of the projections of queries, keys and values; None: as `attention_bias` says
    output_bias: bool | None = None  # of the projection of the output; None: as `attention_bias` says
    qk_norm: QKNorm | None = None
    qk_norm_key: str | None = None  # key of a flag that switches the norms on; None: they are always there
    v_norm: bool = False  # RMSNorm without weights of every value head
    sinks: Sinks | None = None
    gated: bool = False  # `q_proj` also has a gate behind each head's query; its sigmoid multiplies the head's output
    merged: bool = False  # `qkv_proj` is one tensor in checkpoints
    interleaved: bool = False  # neighbouring dimensions are rotated together, not those half of the rotated ones apart


@dataclass(frozen=True)
class WindowRule:
    """The config keys that decide which layers of a family have a `sliding_window`. Other keys are ignored."""

    switched: bool = False  # no layer has a window unless `use_sliding_window` is true
    listed: bool = False  # `layer_types`, if given, decides; the fields below are for configs without it
    from_layer: bool = False  # only layers from `max_window_layers` on have windows
    pattern: int | None = (
        None  # all layers but every n-th have a window; n is `sliding_window_pattern`, by default this number
    )
    turns: tuple[str, ...] = (SLIDING,)  # without `pattern` and `kinds`: the layers' kinds, cyclically
    kinds: Callable[[Keys, int], list[str]] | None = None  # returns the kind of each layer, given their number
    beside_key: str | None = None  # a key with the window less the query's own key; wins over `sliding_window`
    own_rope: bool = False  # layers with a window have their own rope parameters; `sliding_window` is then required


def read_layer_windows(rule: WindowRule | None, keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer: how many keys a query sees, its own included; None: all. Raises `ModelError`."""
    if rule is None or (keys.values.get("sliding_window") is None and not rule.own_rope):
        return (None,) * num_layers
    if rule.switched and not keys.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = keys.integer("sliding_window")
    if rule.beside_key is not None and keys.values.get(rule.beside_key) is not None:
        window = keys.integer(rule.beside_key) + 1
    return tuple(window if kind == SLIDING else None for kind in _kinds(rule, keys, num_layers))


def read_heads_by_window(keys: Keys) -> tuple[HeadShape, HeadShape]:
    """Read Gemma 4's KV heads of layers with full attention, and of layers with a window. Raises `ModelError`.

    transformers writes the heads of full layers once per layer (`per_layer_config`), the model's authors only once.
    """
    kinds = keys.values.get("layer_types")
    if isinstance(kinds, list) and kinds and kinds[-1] == SLIDING:
        raise UnsupportedModel(f"config.json: layer_types that end in {SLIDING} are not supported")
    num_kv_heads, dim = keys.integer("num_key_value_heads"), keys.integer("head_dim")
    shares_projection = keys.flag("attention_k_eq_v", False)
    own = _of_full_layers(keys, kinds)
    if own is None:
        full_dim = keys.integer("global_head_dim", 512)
        full_kv_heads = keys.integer("num_global_key_value_heads", num_kv_heads) if shares_projection else num_kv_heads
    else:
        full_dim, full_kv_heads = own.integer("head_dim", dim), own.integer("num_key_value_heads", num_kv_heads)
    if keys.integer("num_attention_heads") % full_kv_heads or full_dim % 2:
        raise InvalidModelConfig(
            f"config.json: {full_kv_heads} KV heads of {full_dim} in full_attention layers do not fit the model"
        )
    return HeadShape(full_kv_heads, full_dim, full_dim, not shares_projection), HeadShape(num_kv_heads, dim, dim)


def read_swa_heads(keys: Keys) -> tuple[HeadShape, HeadShape]:
    """Read MiMo's heads of layers with full attention, and with a window (keys `swa_*`). Raises `ModelError`."""
    key_dim, value_dim = keys.integer("head_dim"), keys.integer("v_head_dim", 128)
    same = {
        "swa_head_dim": key_dim,
        "swa_v_head_dim": value_dim,
        "swa_num_attention_heads": keys.integer("num_attention_heads"),
    }
    for name, only in same.items():
        if keys.integer(name, only) != only:
            raise UnsupportedModel(f"config.json: {name} {keys.values[name]} is not supported beside {only} elsewhere")
    full = keys.integer("num_key_value_heads")
    windowed = keys.integer("swa_num_key_value_heads", 2 * full)
    if keys.integer("num_attention_heads") % windowed:
        raise InvalidModelConfig(f"config.json: num_attention_heads must be a multiple of {windowed} KV heads")
    return HeadShape(full, key_dim, value_dim), HeadShape(windowed, key_dim, value_dim)


def _of_full_layers(keys: Keys, kinds: object) -> Keys | None:
    """Return the keys that `per_layer_config` repeats for every layer with full attention; None without it."""
    given = keys.values.get("per_layer_config")
    if given is None:
        return None
    if given == {}:  # full layers have the heads of the others
        return Keys("config.json: per_layer_config", {})
    full = {str(layer) for layer, kind in enumerate(kinds) if kind == FULL} if isinstance(kinds, list) else None
    first = next(iter(given.values())) if isinstance(given, dict) else None
    if not isinstance(first, dict) or set(given) != full or any(each != first for each in given.values()):
        raise UnsupportedModel(
            f"config.json: per_layer_config is supported where it says the same of each {FULL} layer, and of no other"
        )
    if unknown := set(first) - {"head_dim", "num_key_value_heads"}:
        raise UnsupportedModel(f"config.json: per_layer_config of {', '.join(sorted(unknown))} is not supported")
    return Keys("config.json: per_layer_config", first)


def read_kv_sources(keys: Keys, windows: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return for each layer the index of the layer whose keys and values it reads.

    The last `num_kv_shared_layers` layers read those of the last earlier layer with the same window; all others read
    their own. Raises `InvalidModelConfig`.
    """
    first = len(windows) - (keys.optional_integer("num_kv_shared_layers", 0) or 0)
    if not 1 <= first <= len(windows):
        raise InvalidModelConfig(
            f"config.json: 'num_kv_shared_layers' must be from 0 to {len(windows) - 1}, not {len(windows) - first}"
        )
    last = {window: layer for layer, window in enumerate(windows[:first])}
    if missing := set(windows) - set(last):
        kind = FULL if None in missing else SLIDING
        raise InvalidModelConfig(f"config.json: 'num_kv_shared_layers' leaves no {kind} layer to share from")
    return (*range(first), *(last[window] for window in windows[first:]))


def _kinds(rule: WindowRule, keys: Keys, num_layers: int) -> list[str]:
    given = keys.values.get("layer_types") if rule.listed else None
    first = (keys.optional_integer("max_window_layers") or 0) if rule.from_layer else 0
    if given is not None:
        return _checked(given, num_layers, (FULL, SLIDING))
    if rule.kinds is not None:
        return _checked(rule.kinds(keys, num_layers), num_layers, (FULL, SLIDING))
    if rule.pattern is not None:
        pattern = keys.integer("sliding_window_pattern", rule.pattern)
        return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]
    return [FULL if layer < first else rule.turns[layer % len(rule.turns)] for layer in range(num_layers)]


def _checked(kinds: object, num_layers: int, known: tuple[str, ...]) -> list[str]:
    if not isinstance(kinds, list):
        raise InvalidModelConfig(f"config.json: 'layer_types' must be a list, not {kinds!r}")
    unknown = sorted({str(kind) for kind in kinds if kind not in known})
    if unknown:
        raise UnsupportedModel(f"config.json: layer_types {', '.join(unknown)} are not supported")
    if len(kinds) != num_layers:
        raise InvalidModelConfig(
            f"config.json: layer_types names {len(kinds)} layers, num_hidden_layers is {num_layers}"
        )
    return kinds


@dataclass(frozen=True)
class LinearAttentionShape:
    """Layers of linear attention: a causal convolution, then heads with a state [key_dim, value_dim] each."""

    layers: tuple[bool, ...]  # for each layer of the model: whether it has linear attention
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int  # filter width: number of inputs that an output of the convolution depends on
    # Rank of the low-rank projections of decays (one per key dimension) and output gates; None: one decay per head.
    gate_rank: int | None = field(default=None, metadata=NEWER)
    beta_scale: float = field(default=1.0, metadata=NEWER)  # see `kernels.gated_delta.Gate`

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_width + self.value_width


def read_linear_attention(keys: Keys, num_layers: int) -> LinearAttentionShape:
    """Read the linear attention of Qwen3-Next and Qwen3.5. Raises `ModelError`."""
    given = keys.values.get("layer_types")
    if given is None:
        interval = keys.integer("full_attention_interval", 4)
        given = [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]
    shape = LinearAttentionShape(
        layers=linear_layers(given, num_layers),
        num_key_heads=keys.integer("linear_num_key_heads", 16),
        num_value_heads=keys.integer("linear_num_value_heads", 32),
        key_dim=keys.integer("linear_key_head_dim", 128),
        value_dim=keys.integer("linear_value_head_dim", 128),
        conv_width=keys.integer("linear_conv_kernel_dim", 4),
    )
    check_linear_heads(shape)
    return shape


def check_linear_heads(shape: LinearAttentionShape) -> None:
    """Raise `ModelError` if the heads of Gated DeltaNet do not fit each other or the kernels."""
    if shape.num_value_heads % shape.num_key_heads:
        raise InvalidModelConfig(
            f"config.json: linear_num_value_heads ({shape.num_value_heads}) must be a multiple of "
            f"linear_num_key_heads ({shape.num_key_heads})"
        )
    check_linear(shape, linear_key_head_dim=shape.key_dim, linear_value_head_dim=shape.value_dim)


def linear_layers(kinds: object, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have linear attention, given a list like `layer_types`. Raises `ModelError`."""
    checked = _checked(kinds, num_layers, (FULL, LINEAR))
    if FULL not in checked:
        raise UnsupportedModel("config.json: 'layer_types' without a full_attention layer is not supported")
    return tuple(kind == LINEAR for kind in checked)


def check_linear(shape: LinearAttentionShape, **dims: int) -> None:
    """Raise `UnsupportedModel` for sizes without kernels. `dims` are sizes of heads by their config keys."""
    if not 2 <= shape.conv_width <= 4:
        raise UnsupportedModel(f"config.json: linear_conv_kernel_dim {shape.conv_width} is not supported, only 2 to 4")
    for name, dim in dims.items():
        if dim not in range(16, 257, 16):
            raise UnsupportedModel(f"config.json: {name} {dim} is not supported, only multiples of 16 from 16 to 256")


@dataclass(frozen=True)
class LatentShape:
    """Latent attention: one vector per token holds a latent for the keys and values of all heads, and a rotated key."""

    rank: int  # size of a latent
    q_rank: int | None  # size of the latent of queries; None: queries are projected from the hidden state directly
    nope_dim: int  # part of a head's query and key that is not rotated
    rope_dim: int  # rotated part of a head's query, and of the key, where all heads share it
    value_dim: int

    @property
    def head_dim(self) -> int:
        """The width of a query, and of a key once it is computed from its latent."""
        return self.nope_dim + self.rope_dim


def read_latent(keys: Keys) -> LatentShape:
    """Read the shape of DeepSeek's latents. Raises `ModelError`."""
    straight = keys.values.get("q_lora_rank", 1536) is None  # null means no latent of queries; a missing key, 1536
    shape = LatentShape(
        rank=keys.integer("kv_lora_rank", 512),
        q_rank=None if straight else keys.integer("q_lora_rank", 1536),
        nope_dim=keys.integer("qk_nope_head_dim", 128),
        rope_dim=keys.integer("qk_rope_head_dim", 64),
        value_dim=keys.integer("v_head_dim", 128),
    )
    if shape.rope_dim % 2:
        raise InvalidModelConfig(f"config.json: qk_rope_head_dim ({shape.rope_dim}) must be even for rotary embeddings")
    if shape.head_dim % 2:
        raise InvalidModelConfig(
            f"config.json: qk_nope_head_dim ({shape.nope_dim}) and qk_rope_head_dim ({shape.rope_dim}) must add up to "
            f"an even width of queries and keys, not {shape.head_dim}"
        )
    if shape.q_rank is None and keys.flag("attention_bias", False):
        raise UnsupportedModel("config.json: attention_bias without a q_lora_rank is not supported")
    return shape
