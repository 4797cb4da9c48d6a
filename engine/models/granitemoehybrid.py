"""Granite 4 hybrids: most layers have Mamba-2 (arXiv:2405.21060), some attention; with mixtures of experts or MLPs."""

from __future__ import annotations

from collections.abc import Iterator

from baton.engine import layers
from baton.engine.hf_config.errors import UnsupportedModel
from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import caches_of_blocks
from baton.engine.hf_config.mamba import ATTENTION, MAMBA, MLP, MOE, MambaShape, read_block_types, read_mamba
from baton.engine.hf_config.model_config import ModelConfig, Scales
from baton.engine.hf_config.rope_reader import no_rotated_layers
from baton.engine.layers.base import Layer
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family


class GraniteMoeHybridLayer(DecoderLayer):
    """x + mixer(norm(x)) * m, then x + (experts(norm(x)) + mlp(norm(x))) * m, with `residual_multiplier` m.

    The mixer is Mamba-2 or attention. Attention rotates only if the config says so. Some models have no experts.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        assert config.mamba is not None, "a config of this family has Mamba-2"
        size, eps, scales = config.hidden_size, config.rms_norm_eps, config.scales
        self.input_layernorm = layers.RMSNorm(size, eps)
        self.mamba: layers.Mamba2 | None = None
        self.self_attn: layers.Attention | None = None
        if config.mamba.has(index, MAMBA):
            self.mamba = layers.Mamba2(config, index)
        else:
            self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(size, eps)
        mlp = layers.GatedMLP(
            size, config.intermediate_size, merged="input_linear", output_multiplier=scales.mlp_output
        )
        self.shared_mlp: layers.FeedForward = mlp
        self._has_experts = config.moe is not None
        if config.moe is not None:
            names = {
                "gate": "block_sparse_moe.router.layer",
                "experts": "block_sparse_moe",
                "shared_experts": "shared_mlp",
            }
            self.shared_mlp = layers.MoE(size, config.moe, names=names, shared=mlp)

    def children(self) -> Iterator[tuple[str, Layer]]:
        """Yield the mixture under the layer's own path: in checkpoints, its parts lie directly below the layer."""
        for name, child in super().children():
            yield "" if child is self.shared_mlp and self._has_experts else name, child

    def __call__(self, step: layers.LayerStep) -> None:
        mixer = self.mamba or self.self_attn
        assert mixer is not None, "a layer has one of both"
        step.attend(mixer, before=self.input_layernorm)
        step.feed_forward(self.shared_mlp, before=self.post_attention_layernorm)


def read_scales(keys: Keys) -> Scales:
    residual = keys.number("residual_multiplier", 1.0)
    return Scales(
        embedding=keys.number("embedding_multiplier", 1.0),
        rounds_embedding=False,
        score=keys.number("attention_multiplier", 1.0),
        attention_output=residual,
        mlp_output=residual,
        logit=1.0 / (keys.optional_positive("logits_scaling") or 1.0),
    )


def read_experts(keys: Keys, num_layers: int) -> ExpertsConfig | None:
    num_experts = keys.optional_integer("num_local_experts", 8)
    if num_experts == 0:
        return None
    return ExpertsConfig(
        num_experts=keys.integer("num_local_experts", 8),
        top_k=keys.integer("num_experts_per_tok", 2),
        intermediate_size=keys.integer("intermediate_size"),
        intermediate_size_key="intermediate_size",
        shared_intermediate_size=keys.integer("shared_intermediate_size", 1024),
        renormalize=True,  # softmax over the chosen experts' logits equals softmax over all, renormalized
        scale=keys.number("residual_multiplier", 1.0),
        stored="linears",
        sparse_layers=(True,) * num_layers,
    )


def read_granite(keys: Keys, num_layers: int) -> MambaShape:
    kinds = read_block_types(keys, (MAMBA, ATTENTION), num_layers) or [MAMBA] * num_layers
    feed_forward = MLP if read_experts(keys, num_layers) is None else MOE
    blocks = tuple((kind, feed_forward) for kind in kinds)
    return read_mamba(keys, blocks, output_multiplier=keys.number("residual_multiplier", 1.0))


def read_rotated_layers(keys: Keys, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    kind = keys.values.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise UnsupportedModel(
            f"config.json: position_embedding_type {kind!r} is not supported, only 'rope', 'nope' or null"
        )
    return () if kind == "rope" else no_rotated_layers(keys, windows)


FAMILY = Family(
    architecture="GraniteMoeHybridForCausalLM",
    layer=GraniteMoeHybridLayer,
    cache=caches_of_blocks,
    defaults={"max_position_embeddings": 2048, "shared_intermediate_size": 1024},
    only={"normalization_function": "rmsnorm"},
    mamba=read_granite,
    experts=read_experts,
    scales=read_scales,
    rotated_layers=read_rotated_layers,
    mlp_width_key="shared_intermediate_size",
)
