"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is a single block (arXiv:2504.03624)."""

from __future__ import annotations

from baton.engine import layers
from baton.engine.hf_config.attention import AttentionForm
from baton.engine.hf_config.errors import UnsupportedModel
from baton.engine.hf_config.experts import ExpertsConfig, read_num_experts
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import caches_of_blocks
from baton.engine.hf_config.mamba import (
    ATTENTION,
    MAMBA,
    MLP,
    MOE,
    Blocks,
    MambaDefaults,
    MambaKeys,
    MambaShape,
    read_block_types,
    read_mamba,
)
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.hf_config.rope_reader import no_rotated_layers
from baton.engine.layers.decoder_layer import DecoderLayer

from . import Family

LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}  # letters of `hybrid_override_pattern`
KEYS = MambaKeys(
    num_heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    num_groups="n_groups",
    state_dim="ssm_state_size",
    conv_width="conv_kernel",
    conv_bias="use_conv_bias",
    projection_bias="use_bias",
)


class NemotronHLayer(DecoderLayer):
    """x + block(norm(x)); the block is Mamba-2, attention without rotation, an MLP, or a mixture of experts.

    MLPs and experts have a squared ReLU and no gates. Experts may work on latents instead of hidden states.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        assert config.mamba is not None, "a config of this family has Mamba-2"
        self.norm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = _block(config, index)

    def __call__(self, step: layers.LayerStep) -> None:
        if isinstance(self.mixer, layers.TokenMixer):
            step.attend(self.mixer, before=self.norm)
        else:
            step.feed_forward(self.mixer, before=self.norm)


def _block(config: ModelConfig, index: int) -> layers.TokenMixer | layers.FeedForward:
    assert config.mamba is not None, "a config of this family has Mamba-2"
    (kind,) = config.mamba.blocks[index]
    if kind == MAMBA:
        return layers.Mamba2(config, index)
    if kind == ATTENTION:
        return layers.Attention(config, index)
    if kind == MLP:
        return layers.MLP(config.hidden_size, config.intermediate_size)
    assert config.moe is not None, "a layer of experts has a config of them"
    return layers.MoE(config.hidden_size, config.moe)


def read_blocks(keys: Keys) -> Blocks:
    kinds = read_block_types(keys, tuple(LETTERS.values()))
    pattern = keys.values.get("hybrid_override_pattern")
    if kinds is None and pattern is not None:
        if not isinstance(pattern, str) or set(pattern) - set(LETTERS):
            raise UnsupportedModel(
                f"config.json: hybrid_override_pattern {pattern!r} is not supported, only {' '.join(LETTERS)}"
            )
        kinds = [LETTERS[letter] for letter in pattern]
    return tuple((kind,) for kind in kinds or (MAMBA, MOE, ATTENTION, MLP))


def read_nemotron(keys: Keys, num_layers: int) -> MambaShape:
    """Read the Mamba-2 mixers. Time steps are limited by `time_step_limit`, as in training, not by `time_step_min`."""
    return read_mamba(keys, read_blocks(keys), KEYS, MambaDefaults(head_dim=64, num_groups=8, state_dim=128))


def read_experts(keys: Keys, num_layers: int) -> ExpertsConfig | None:
    blocks = read_blocks(keys)
    if (MOE,) not in blocks:
        return None
    return ExpertsConfig(
        num_experts=read_num_experts(keys, ("n_routed_experts", "num_local_experts"), 8),
        top_k=keys.integer("num_experts_per_tok", 2),
        intermediate_size=keys.integer("moe_intermediate_size", 7688),
        shared_intermediate_size=keys.integer("moe_shared_expert_intermediate_size", 7688),
        scoring="sigmoid",
        renormalize=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 1.0),
        num_groups=keys.integer("n_group", 1),
        top_groups=keys.integer("topk_group", 1),
        group_score="top2",
        score_correction=True,
        projections=("up_proj", "down_proj"),
        sparse_layers=tuple(block == (MOE,) for block in blocks),
        is_gated=False,
        latent_size=keys.optional_integer("moe_latent_size"),
    )


def count_layers(keys: Keys) -> int:
    return len(read_blocks(keys))


def draft_layers(config: ModelConfig) -> tuple[str, ...]:
    return ("mtp.*",)


FAMILY = Family(
    architecture="NemotronHForCausalLM",
    layer=NemotronHLayer,
    cache=caches_of_blocks,
    attention=AttentionForm(qkv_bias=False, output_bias=False),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21_504,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
    },
    only={
        "attention_bias": False,
        "mlp_bias": False,
        "residual_in_fp32": False,
        "tie_word_embeddings": False,
        "mamba_hidden_act": "silu",
        "n_shared_experts": 1,
    },
    mamba=read_nemotron,
    num_layers=count_layers,
    experts=read_experts,
    rotated_layers=no_rotated_layers,
    activation="relu2",
    activation_key="mlp_hidden_act",
    norm_eps_key="layer_norm_epsilon",
    names={"model": "backbone", "embed_tokens": "embeddings", "norm": "norm_f"},
    ignored_tensors=draft_layers,
)
