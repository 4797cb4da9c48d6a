"""Ministral 3, Mistral Large 3's smaller siblings, and Devstral 2 (arXiv:2601.08584)."""

from __future__ import annotations

from typing import Any

from baton.engine.hf_config.attention import AttentionForm, WindowRule
from baton.engine.hf_config.layer_caches import keys_and_values

from . import Family
from .mistral import MistralLayer

ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Ministral3Layer(MistralLayer):
    """The layer of Mistral; queries at later positions are longer."""


FAMILY = Family(
    architecture="Ministral3ForCausalLM",
    multimodal={"Mistral3ForConditionalGeneration": "ministral3"},
    layer=Ministral3Layer,
    cache=keys_and_values,
    attention=AttentionForm(qkv_bias=False, output_bias=False),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_parameters": ROPE},
    windows=WindowRule(),
    grows_queries=True,
)
