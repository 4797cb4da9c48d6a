"""MiMo-V2-Flash (arXiv:2601.02780)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from baton.engine import layers
from baton.engine.hf_config.attention import FULL, SLIDING, AttentionForm, Sinks, WindowRule, read_swa_heads
from baton.engine.hf_config.experts import ExpertsConfig, read_num_experts, sparse_as_listed
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import keys_and_values
from baton.engine.hf_config.model_config import DraftRules, ModelConfig, Scales
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family

if TYPE_CHECKING:
    from baton.engine.layers.base import Slot


class MiMoV2FlashLayer(DecoderLayer):
    """x + attention(norm(x)), then x + experts(norm(x)), in the first layer x + mlp(norm(x)).

    Most layers have a window, twice as many KV heads as the others, and a sink in every head. Keys are wider than
    values, a third of each is rotated, and attention's output is multiplied by a factor. A draft layer has a window,
    no experts, and another name for its second norm.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        assert config.moe is not None, "a config of this family has experts"
        size = config.hidden_size
        self.input_layernorm = layers.RMSNorm(size, config.rms_norm_eps)
        self.self_attn = layers.Attention(config, index)
        self.post_attention_layernorm = layers.RMSNorm(size, config.rms_norm_eps)
        self._is_draft = index >= config.num_layers
        self.mlp: layers.FeedForward
        if config.moe.sparse_layers[index]:
            self.mlp = layers.MoE(size, config.moe)
        else:
            self.mlp = layers.GatedMLP(size, config.intermediate_size)

    def slots(self, path: str = "") -> Iterator[Slot]:
        for slot in super().slots(path):
            if slot.name.endswith(".sinks"):
                slot.name = slot.name.removesuffix("sinks") + "attention_sink_bias"
            if self._is_draft:
                slot.name = slot.name.replace(".post_attention_layernorm.", ".pre_mlp_layernorm.")
            yield slot

    def __call__(self, step: layers.LayerStep) -> None:
        step.attend(self.self_attn, before=self.input_layernorm)
        step.feed_forward(self.mlp, before=self.post_attention_layernorm)


def read_kinds(keys: Keys, num_layers: int) -> list[str]:
    """Return the kinds of layers. In the authors' list, 1 stands for a window."""
    pattern = keys.values.get("hybrid_layer_pattern")
    if pattern is None:
        return [SLIDING if layer and (layer + 1) % 6 else FULL for layer in range(num_layers)]
    return [SLIDING if has_window else FULL for has_window in keys.layer_flags("hybrid_layer_pattern", num_layers)]


def read_experts(keys: Keys, num_layers: int) -> ExpertsConfig:
    sparse = sparse_as_listed(keys, num_layers)
    if sparse is None and keys.values.get("moe_layer_freq") is not None:
        sparse = keys.layer_flags("moe_layer_freq", num_layers)
    return ExpertsConfig(
        num_experts=read_num_experts(keys, ("n_routed_experts", "num_local_experts"), 256),
        top_k=keys.integer("num_experts_per_tok", 8),
        intermediate_size=keys.integer("moe_intermediate_size", 2048),
        shared_intermediate_size=0,
        scoring="sigmoid",
        renormalize=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 1.0),
        num_groups=keys.integer("n_group", 1),
        top_groups=keys.integer("topk_group", 1),
        group_score="top2",
        score_correction=True,
        wide_router=True,
        sparse_layers=tuple(layer > 0 for layer in range(num_layers)) if sparse is None else sparse,
    )


def read_scales(keys: Keys) -> Scales:
    """Return the scales. The config's factor of values is applied to attention's output, which is the same."""
    return Scales(attention_output=keys.number("attention_value_scale", 1.0))


def draft_layers(config: ModelConfig) -> tuple[str, ...]:
    """Return the pattern of the draft layers' tensors, if draft layers are not run."""
    return () if config.num_run_draft_layers else ("model.mtp.*",)


def path_of_draft_layer(config: ModelConfig, number: int) -> str:
    return f"model.mtp.layers.{number}"


FAMILY = Family(
    architecture="MiMoV2FlashForCausalLM",
    layer=MiMoV2FlashLayer,
    cache=keys_and_values,
    attention=AttentionForm(output_bias=False, sinks=Sinks.WINDOWS),
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 192,
        "sliding_window": 129,
        "rms_norm_eps": 1e-5,
        "attention_value_scale": 0.707,
        "rope_theta": 5_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "num_nextn_predict_layers": 3,  # missing in the authors' config.json
    },
    key_names={"swa_rope_theta": "rope_local_base_freq", "layernorm_epsilon": "rms_norm_eps"},
    only={
        "topk_method": "noaux_tc",
        "n_shared_experts": 0,
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
    },
    heads=read_swa_heads,
    windows=WindowRule(listed=True, kinds=read_kinds, beside_key="sliding_window_size", own_rope=True),
    rotary_fraction=0.334,
    experts=read_experts,
    scales=read_scales,
    ignored_tensors=draft_layers,
    draft=DraftRules(
        path=path_of_draft_layer,
        layer="",
        embedding_norm="enorm",
        hidden_norm="hnorm",
        projection="eh_proj",
        norm="final_layernorm",
        one_each=True,
        reads_total=True,
        has_window=True,
        is_dense=True,
    ),
)
