"""Qwen3.5, dense text models: three layers of Gated DeltaNet (arXiv:2412.06464), then one of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm, QKNorm, read_linear_attention
from baton.engine.hf_config.layer_caches import keys_and_values_or_states
from baton.engine.hf_config.model_config import DraftRules, ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family

NORM_OFFSET = 1.0


class Qwen35Layer(DecoderLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x)); the mixer is Gated DeltaNet, or attention with a gate for every head.

    A norm on every query and key head comes before the rotation, which turns a quarter of each head.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        assert config.linear is not None, "a config of this family has linear attention"
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = layers.RMSNorm(size, eps, offset=NORM_OFFSET)
        self.linear_attn: layers.GatedDeltaNet | None = None
        self.self_attn: layers.Attention | None = None
        if config.linear.layers[index]:
            self.linear_attn = self.make_delta_net(config, index)
        else:
            self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(size, eps, offset=NORM_OFFSET)
        self.mlp = self.make_mlp(config, index)

    def make_delta_net(self, config: ModelConfig, index: int) -> layers.GatedDeltaNet:
        return layers.GatedDeltaNet(config, index)

    def make_mlp(self, config: ModelConfig, index: int) -> layers.FeedForward:
        return layers.GatedMLP(config.hidden_size, config.intermediate_size)

    def __call__(self, step: layers.LayerStep) -> None:
        mixer = self.linear_attn or self.self_attn
        assert mixer is not None
        step.attend(mixer, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


def draft_layers(config: ModelConfig) -> tuple[str, ...]:
    return () if config.num_run_draft_layers else ("mtp.*",)


def path_of_draft_layer(config: ModelConfig, number: int) -> str:
    return "mtp"


DRAFT_RULES = DraftRules(
    path=path_of_draft_layer,
    layer="layers.0",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    norm="norm",
    goes_on_normed=True,
)


GATES: Mapping[str, Any] = {"attn_output_gate": True, "output_gate_type": "swish"}  # of attention, and of delta nets

FAMILY = Family(
    architecture="Qwen3_5ForCausalLM",
    multimodal={"Qwen3_5ForConditionalGeneration": "qwen3_5_text"},
    layer=Qwen35Layer,
    cache=keys_and_values_or_states,
    attention=AttentionForm(qk_norm=QKNorm.HEAD, gated=True),
    defaults={"num_key_value_heads": 4, "head_dim": 256},
    only=GATES,
    linear=read_linear_attention,
    rotary_fraction=0.25,
    norm_offset=NORM_OFFSET,
    ignored_tensors=draft_layers,
    draft=DRAFT_RULES,
)
