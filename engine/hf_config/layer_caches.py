"""Say what one layer of a model caches for the tokens of a sequence: each family's `ConfigRules.cache` is one of these.

keys_and_values             a key and a value for every KV head
keys_and_values_or_shared   ... nothing in layers that read another layer's
latents                     a latent for all heads (DeepSeek-V2, arXiv:2405.04434)
keys_and_values_or_states   ... a state in layers of linear attention
latents_or_states           ... a state in layers of linear attention
caches_of_blocks            keys and values, a state, both or nothing (models with Mamba-2)
"""

from __future__ import annotations

from ..core.layout import (
    CacheKind,
    LayerCache,
    LayerCaches,
    LayerState,
    StatePart,
    StateRows,
)
from .mamba import ATTENTION, MAMBA
from .model_config import ModelConfig


def keys_and_values_or_shared(config: ModelConfig, layer: int) -> LayerCaches:
    """Keep keys and values; nothing in layers that read another layer's."""
    return keys_and_values(config, layer) if config.kv_source(layer) == layer else ()


def unread_keys_and_values(config: ModelConfig) -> tuple[str, ...]:
    """Return patterns of unused tensors: published checkpoints have them in layers that read another layer's cache."""
    shared = (layer for layer in range(config.num_layers) if config.kv_source(layer) != layer)
    names = ("k_proj.*", "v_proj.*", "k_norm.*", "v_norm.*")
    return tuple(f"model.layers.{layer}.self_attn.{name}" for layer in shared for name in names)


def keys_and_values(config: ModelConfig, layer: int) -> tuple[LayerCache]:
    """Keep a key and a value for every KV head; only those in the layer's window if `window_caches` is set."""
    window = config.layer_windows[layer] if config.window_caches else None
    if window is not None and window >= config.max_model_len:
        window = None
    heads = config.heads_of(layer)
    is_even = heads.key_dim == heads.value_dim
    cache = LayerCache(
        kind=CacheKind.FULL if window is None else CacheKind.WINDOW,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.key_dim if is_even else heads.key_dim + heads.value_dim,
        num_planes=2 if is_even else 1,  # rows of a key and its value: `kernels.kv_rows`
        dtype=config.cache_dtype,
        window=window,
    )
    return (cache,)


def latents(config: ModelConfig, layer: int) -> tuple[LayerCache]:
    """Keep a latent, and the rotated part of the key, which all heads share."""
    assert config.latent is not None, "a config of this family has latents"
    cache = LayerCache(
        kind=CacheKind.LATENT,
        num_kv_heads=1,
        num_planes=1,
        head_dim=config.latent.rank + config.latent.rope_dim,
        dtype=config.cache_dtype,
    )
    return (cache,)


def keys_and_values_or_states(config: ModelConfig, layer: int) -> LayerCaches:
    """Keep keys and values; in layers of linear attention the last inputs of the convolution, and a state per head."""
    return linear_states(config, layer) or keys_and_values(config, layer)


def latents_or_states(config: ModelConfig, layer: int) -> LayerCaches:
    """Keep latents; in layers of linear attention the last inputs of the convolution, and a state per head."""
    return linear_states(config, layer) or latents(config, layer)


def linear_states(config: ModelConfig, layer: int) -> tuple[()] | tuple[LayerState]:
    """Return the state of a layer of linear attention; nothing for other layers."""
    shape = config.linear
    if shape is None or not shape.layers[layer]:
        return ()
    heads = shape.num_value_heads
    state = LayerState(
        (
            StatePart(
                (shape.conv_channels, shape.conv_width - 1),
                config.dtype,
                rows=(*[StateRows(shape.num_key_heads, shape.key_dim)] * 2, StateRows(heads, shape.value_dim)),
            ),
            StatePart((heads, shape.key_dim, shape.value_dim), "float32"),
        )
    )
    return (state,)


def caches_of_blocks(config: ModelConfig, layer: int) -> LayerCaches:
    """Keep keys and values of a layer's attention, and the last convolution inputs and the state of its Mamba-2.

    Heads are divided over ranks. The groups that share B and C are divided, too, or shared by ranks if they are fewer.
    """
    shape = config.mamba
    assert shape is not None, "a config of this family has Mamba-2"
    cache = keys_and_values(config, layer) if shape.has(layer, ATTENTION) else ()
    if not shape.has(layer, MAMBA):
        return cache
    heads, groups = StateRows(shape.num_heads, shape.head_dim), StateRows(shape.num_groups, shape.state_dim)
    state = LayerState(
        (
            StatePart((shape.conv_channels, shape.conv_width - 1), config.dtype, (heads, groups, groups)),
            StatePart((shape.num_heads, shape.head_dim, shape.state_dim), "float32"),
        )
    )
    return (*cache, state)
