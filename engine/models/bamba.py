"""Bamba: most layers have Mamba-2 (arXiv:2405.21060), some attention; all have an MLP."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.errors import InvalidModelConfig, UnsupportedModel
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import caches_of_blocks
from baton.engine.hf_config.mamba import ATTENTION, MAMBA, MLP, MambaShape, read_mamba
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family


class BambaLayer(DecoderLayer):
    """x + mixers(norm(x)), then x + mlp(norm(x)); the mixer is Mamba-2 or attention, or both side by side."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        assert config.mamba is not None, "a config of this family has Mamba-2"
        size, eps, scales = config.hidden_size, config.rms_norm_eps, config.scales
        self.input_layernorm = layers.RMSNorm(size, eps)
        self.mamba = layers.Mamba2(config, index) if config.mamba.has(index, MAMBA) else None
        self.self_attn: layers.Attention | None = None
        if config.mamba.has(index, ATTENTION):
            self.self_attn = layers.Attention(config, index)
        self.pre_ff_layernorm = layers.RMSNorm(size, eps)
        self.feed_forward = layers.GatedMLP(
            size,
            config.intermediate_size,
            bias=config.mlp_bias,
            gate_multiplier=scales.mlp_gate,
            output_multiplier=scales.mlp_output,
        )

    def __call__(self, step: layers.LayerStep) -> None:
        mixers = [mixer for mixer in (self.mamba, self.self_attn) if mixer is not None]
        step.attend(*mixers, before=self.input_layernorm)
        step.feed_forward(self.feed_forward, before=self.pre_ff_layernorm)


def read_bamba(keys: Keys, num_layers: int) -> MambaShape:
    attention = keys.values.get("attn_layer_indices") or []
    if not isinstance(attention, list) or not all(index in range(num_layers) for index in attention):
        raise InvalidModelConfig(
            f"config.json: 'attn_layer_indices' must be a list of layers from 0 to {num_layers - 1}, not {attention!r}"
        )
    half = keys.integer("head_dim", max(1, keys.integer("hidden_size") // keys.integer("num_attention_heads"))) // 2
    rotated = keys.optional_integer("attn_rotary_emb", half)
    if rotated != half:
        raise UnsupportedModel(
            f"config.json: attn_rotary_emb {rotated} is not supported, only {half}, the half of a head's dimensions"
        )
    blocks = tuple((ATTENTION if index in attention else MAMBA, MLP) for index in range(num_layers))
    return read_mamba(keys, blocks)


FAMILY = Family(
    architecture="BambaForCausalLM",
    layer=BambaLayer,
    cache=caches_of_blocks,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144},
    mamba=read_bamba,
    rotary_fraction=0.5,
    names={"norm": "final_layernorm"},
)
