"""OLMo Hybrid: three layers of Gated DeltaNet (arXiv:2412.06464), then one of attention, as in OLMo 3."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import (
    FULL,
    LINEAR,
    AttentionForm,
    LinearAttentionShape,
    QKNorm,
    check_linear_heads,
    linear_layers,
)
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import keys_and_values_or_states
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.hf_config.rope import DEFAULT_THETA
from baton.engine.hf_config.rope_reader import no_rotated_layers, rope_parameters
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family
from .qwen3_5 import draft_layers

DELTA_NORM_EPS = 1e-5  # epsilon of the norm after the delta rule, whatever `rms_norm_eps` is


class OlmoHybridLayer(DecoderLayer):
    """x + delta net(norm(x)), x + mlp(norm(x)); or x + norm(attention(x)), x + norm(mlp(x)), as in OLMo 2.

    Attention has one norm over all query heads, and one over all key heads. It rotates them if the config has a rope.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        assert config.linear is not None, "a config of this family has linear attention"
        size, eps = config.hidden_size, config.rms_norm_eps
        self.mlp = layers.GatedMLP(size, config.intermediate_size)
        self.linear_attn: layers.GatedDeltaNet | None = None
        if config.linear.layers[index]:
            self.attention_layer_norm = layers.RMSNorm(size, eps)
            self.linear_attn = layers.GatedDeltaNet(config, index, stored="apart", norm_eps=DELTA_NORM_EPS)
            self.feedforward_layer_norm = layers.RMSNorm(size, eps)
        else:
            self.self_attn = layers.Attention(config, index)
            self.post_attention_layernorm = layers.RMSNorm(size, eps)
            self.post_feedforward_layernorm = layers.RMSNorm(size, eps)

    def __call__(self, step: layers.LayerStep) -> None:
        if self.linear_attn is not None:
            step.attend(self.linear_attn, before=self.attention_layer_norm)
            step.feed_forward(self.mlp, before=self.feedforward_layer_norm)
        else:
            step.attend(self.self_attn, after=self.post_attention_layernorm)
            step.feed_forward(self.mlp, after=self.post_feedforward_layernorm)


def read_delta_nets(keys: Keys, num_layers: int) -> LinearAttentionShape:
    heads = keys.integer("num_attention_heads")
    key_heads = keys.integer("linear_num_key_heads", heads)
    key_dim = keys.integer("linear_key_head_dim", max(1, int(0.75 * keys.integer("hidden_size") / key_heads)))
    shape = LinearAttentionShape(
        layers=linear_layers(keys.values.get("layer_types") or _kinds(num_layers), num_layers),
        num_key_heads=key_heads,
        num_value_heads=keys.integer("linear_num_value_heads", heads),
        key_dim=key_dim,
        value_dim=keys.integer("linear_value_head_dim", 2 * key_dim),
        conv_width=keys.integer("linear_conv_kernel_dim", 4),
        beta_scale=2.0 if keys.flag("linear_allow_neg_eigval", True) else 1.0,
    )
    check_linear_heads(shape)
    return shape


def _kinds(num_layers: int) -> list[str]:
    """Return the kind of each layer for a config that lists none: every fourth has attention, or at least the last."""
    if num_layers < 4:
        return [LINEAR] * (num_layers - 1) + [FULL]
    return [FULL if layer % 4 == 3 else LINEAR for layer in range(num_layers)]


def read_rotated_layers(keys: Keys, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Return that no layer rotates if `rope_theta` is null. Without that key, all do, as in transformers."""
    values = {**keys.values, **rope_parameters(keys.values)}
    return () if values.get("rope_theta", DEFAULT_THETA) is not None else no_rotated_layers(keys, windows)


FAMILY = Family(
    architecture="OlmoHybridForCausalLM",
    layer=OlmoHybridLayer,
    cache=keys_and_values_or_states,
    attention=AttentionForm(qk_norm=QKNorm.WIDTH),
    defaults={"vocab_size": 100_352, "max_position_embeddings": 65_536},
    linear=read_delta_nets,
    rotated_layers=read_rotated_layers,
    ignored_tensors=draft_layers,
)
