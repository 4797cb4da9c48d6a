"""EXAONE 4.0 (arXiv:2507.11407)."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import FULL, SLIDING, AttentionForm, QKNorm, WindowRule
from baton.engine.hf_config.errors import InvalidModelConfig
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family


class Exaone4Layer(DecoderLayer):
    """x + norm(attention(x)), then x + norm(mlp(x)), with a norm on every query and key head.

    In models with windows, layers without one do not rotate queries and keys.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = layers.GatedMLP(config.hidden_size, config.intermediate_size)
        self.post_feedforward_layernorm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, after=self.post_attention_layernorm)
        step.feed_forward(self.mlp, after=self.post_feedforward_layernorm)


def read_kinds(keys: Keys, num_layers: int) -> list[str]:
    """Return the kinds of layers by `sliding_window_pattern`: a period, or a word like LLLG (L has a window)."""
    pattern = keys.values.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise InvalidModelConfig(
                f"config.json: 'sliding_window_pattern' must be a number, or letters L and G, not {pattern!r}"
            )
        return [SLIDING if pattern[layer % len(pattern)] == "L" else FULL for layer in range(num_layers)]
    every = keys.integer("sliding_window_pattern", 4)
    return [SLIDING if (layer + 1) % every else FULL for layer in range(num_layers)]


def read_rotated_layers(keys: Keys, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    return tuple(window is not None or keys.values.get("sliding_window") is None for window in windows)


FAMILY = Family(
    architecture="Exaone4ForCausalLM",
    layer=Exaone4Layer,
    cache=keys_and_values,
    attention=AttentionForm(qkv_bias=False, output_bias=False, qk_norm=QKNorm.HEAD),
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096},
    windows=WindowRule(listed=True, kinds=read_kinds),
    rotated_layers=read_rotated_layers,
)
