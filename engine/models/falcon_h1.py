"""Falcon-H1: attention and Mamba-2 side by side in every layer (arXiv:2507.22448)."""

from __future__ import annotations

from baton.engine.hf_config.errors import InvalidModelConfig
from baton.engine.hf_config.keys import Keys
from baton.engine.hf_config.layer_caches import caches_of_blocks
from baton.engine.hf_config.mamba import (
    ATTENTION,
    MAMBA,
    MLP,
    NUM_PARTS,
    MambaKeys,
    MambaNorm,
    MambaShape,
    read_mamba,
)
from baton.engine.hf_config.model_config import Scales

from . import Family
from .bamba import BambaLayer


class FalconH1Layer(BambaLayer):
    """x + mamba(norm(x)) + attention(norm(x)), then x + mlp(norm(x)), with multipliers in many places.

    The multipliers become factors of weights, and of attention scores: a factor of attention's input multiplies its
    queries, keys and values.
    """


def read_scales(keys: Keys) -> Scales:
    heads, hidden_size = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    head_dim = keys.integer("head_dim", max(1, hidden_size // heads))
    attention_input = keys.number("attention_in_multiplier", 1.0)
    mlp_gate, mlp_output = _multipliers(keys, "mlp_multipliers", 2)
    return Scales(
        embedding=keys.number("embedding_multiplier", 1.0),
        rounds_embedding=False,
        score=head_dim**-0.5 * attention_input**2 * keys.number("key_multiplier", 1.0),
        attention_output=attention_input * keys.number("attention_out_multiplier", 1.0),
        mlp_gate=mlp_gate,
        mlp_output=mlp_output,
        logit=keys.number("lm_head_multiplier", 1.0),
    )


def read_falcon(keys: Keys, num_layers: int) -> MambaShape:
    norm = MambaNorm.NONE
    if keys.flag("mamba_rms_norm", False):
        norm = MambaNorm.NORM_FIRST if keys.flag("mamba_norm_before_gate", True) else MambaNorm.GATE_FIRST
    of_input = keys.number("ssm_in_multiplier", 1.0)
    return read_mamba(
        keys,
        ((MAMBA, ATTENTION, MLP),) * num_layers,
        MambaKeys(width="mamba_d_ssm"),
        norm=norm.value,
        multipliers=tuple(of_input * factor for factor in _multipliers(keys, "ssm_multipliers", NUM_PARTS)),
        output_multiplier=keys.number("ssm_out_multiplier", 1.0),
    )


def _multipliers(keys: Keys, name: str, count: int) -> list[float]:
    given = keys.values.get(name)
    if given is None:
        return [1.0] * count
    if (
        not isinstance(given, list)
        or len(given) != count
        or not all(isinstance(factor, int | float) for factor in given)
    ):
        raise InvalidModelConfig(f"config.json: {name!r} must be a list of {count} numbers, not {given!r}")
    return [float(factor) for factor in given]


FAMILY = Family(
    architecture="FalconH1ForCausalLM",
    layer=FalconH1Layer,
    cache=caches_of_blocks,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "mamba_d_ssm": 1024},
    only={
        "attention_bias": False,
        "mlp_bias": False,
        "mamba_proj_bias": False,
        "mamba_use_mlp": True,
        "projectors_bias": False,
    },
    mamba=read_falcon,
    scales=read_scales,
    names={"norm": "final_layernorm"},
)
