"""Kimi Linear (arXiv:2510.26692): three layers of Kimi Delta Attention, then one of latent attention; mixtures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from baton.engine import layers
from baton.engine.hf_config.attention import (
    FULL,
    LINEAR,
    LinearAttentionShape,
    check_linear,
    linear_layers,
    read_latent,
)
from baton.engine.hf_config.errors import InvalidModelConfig
from baton.engine.hf_config.experts import ExpertsConfig, sparse_after_dense, sparse_as_listed
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import latents_or_states
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.hf_config.rope_reader import no_rotated_layers
from baton.engine.layers.base import Layer
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family


class KimiLinearLayer(DecoderLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x)); the mixer is delta attention, or latent attention without rope."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        assert config.linear is not None, "a config of this family has linear attention"
        assert config.moe is not None, "a config of this family has experts"
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = layers.RMSNorm(size, eps)
        self.self_attn: layers.TokenMixer
        if config.linear.layers[index]:
            self.self_attn = layers.KimiDeltaAttention(config, index)
        else:
            self.self_attn = layers.LatentAttention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(size, eps)
        self.mlp: layers.FeedForward
        if config.moe.sparse_layers[index]:
            self.mlp, self._mlp_name = layers.MoE(size, config.moe), "block_sparse_moe"
        else:
            self.mlp, self._mlp_name = layers.GatedMLP(size, config.intermediate_size), config.moe.dense_name

    def children(self) -> Iterator[tuple[str, Layer]]:
        """Yield the MLP under its name in checkpoints."""
        for name, child in super().children():
            yield self._mlp_name if child is self.mlp else name, child

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


def read_delta_attention(keys: Keys, num_layers: int) -> LinearAttentionShape:
    """Read `linear_attn_config`, as the model's authors write it, or the keys that transformers writes instead."""
    nested = keys.values.get("linear_attn_config") or {}
    if not isinstance(nested, Mapping):
        raise InvalidModelConfig(f"config.json: 'linear_attn_config' must be an object, not {nested!r}")
    inner = Keys("config.json: linear_attn_config", nested)
    dim = inner.integer("head_dim", keys.integer("linear_head_dim", 128))
    heads = inner.integer("num_heads", keys.integer("linear_num_heads", 32))
    shape = LinearAttentionShape(
        layers=linear_layers(keys.values.get("layer_types") or _kinds(nested, num_layers), num_layers),
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_width=inner.integer("short_conv_kernel_size", keys.integer("linear_conv_kernel_dim", 4)),
        gate_rank=dim,
    )
    check_linear(shape, linear_head_dim=dim)
    return shape


def _kinds(nested: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return the kind of each layer. Lists count layers from 1; without lists, layers 4, 8, ... are full (from 0)."""
    full, linear = nested.get("full_attn_layers"), nested.get("kda_layers")
    if full is None or linear is None:
        return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(num_layers)]
    both = [*full, *linear] if isinstance(full, list) and isinstance(linear, list) else []
    if set(both) != set(range(1, num_layers + 1)) or len(both) != num_layers:
        raise InvalidModelConfig(
            "config.json: linear_attn_config: 'full_attn_layers' and 'kda_layers' must be lists that have each of the "
            f"{num_layers} layers once, counted from 1, not {full!r} and {linear!r}"
        )
    return [FULL if layer in full else LINEAR for layer in range(1, num_layers + 1)]


def read_experts(keys: Keys, num_layers: int) -> ExpertsConfig:
    width = keys.integer("moe_intermediate_size", 1024)
    return ExpertsConfig(
        num_experts=keys.integer("num_local_experts", 256),
        top_k=keys.integer("num_experts_per_tok", 8),
        intermediate_size=width,
        shared_intermediate_size=width * keys.integer("n_shared_experts", 1, maximum=1024),
        scoring="sigmoid",
        renormalize=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 2.446),
        num_groups=keys.integer("n_group", 1),
        top_groups=keys.integer("topk_group", 1),
        group_score="top2",
        score_correction=True,
        projections=("w1", "w3", "w2"),
        sparse_layers=sparse_as_listed(keys, num_layers) or sparse_after_dense(keys, 1, num_layers),
    )


FAMILY = Family(
    architecture="KimiLinearForCausalLM",
    layer=KimiLinearLayer,
    cache=latents_or_states,
    defaults={"rms_norm_eps": 1e-5, "q_lora_rank": None, "max_position_embeddings": 1_048_576},
    key_names={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    only={
        "mla_use_nope": True,
        "mla_use_output_gate": False,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "routed_expert_hidden_size": None,
        "tie_word_embeddings": False,  # transformers ignores it
        "use_grouped_topk": True,
    },
    linear=read_delta_attention,
    latent=read_latent,
    experts=read_experts,
    rotated_layers=no_rotated_layers,
)
