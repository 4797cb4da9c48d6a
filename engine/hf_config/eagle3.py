"""Reads the config of an EAGLE-3 head (arXiv:2503.01840): a decoder layer that drafts tokens for one model.

config.json of the head ──> ModelConfig of one layer, with the model's sizes, for `layers.eagle3`
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from .config_reader import identity_of
from .errors import InvalidModelConfig, UnsupportedModel
from .folder import ModelFolder
from .keys import Keys
from .layer_caches import keys_and_values
from .model_config import ConfigRules, Eagle3Shape, ModelConfig, Scales
from .rope_reader import read_rope

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
RULES = ConfigRules(architecture=ARCHITECTURES[0], cache=keys_and_values)


def read_eagle3(path: Path, model: ModelConfig) -> ModelConfig:
    """Read the config of a head that drafts for `model`, and computes in its dtype. Raises `ModelError`."""
    folder = ModelFolder.open(path, with_weights=model.load_format != "dummy")
    keys = Keys("config.json", folder.config)
    given = keys.values.get("architectures")
    if not isinstance(given, list) or not any(name in ARCHITECTURES for name in given):
        raise UnsupportedModel(
            f"config.json: architectures {given} are not an EAGLE-3 head; supported are {ARCHITECTURES}"
        )
    _check(keys, model)
    num_heads = keys.integer("num_attention_heads")
    rope = read_rope(keys.values, keys.integer("max_position_embeddings", model.max_model_len))
    fields: dict[str, Any] = {
        "architecture": ARCHITECTURES[0],
        "hidden_size": model.hidden_size,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": keys.integer("num_key_value_heads", num_heads),
        "head_dim": keys.integer("head_dim", model.hidden_size // num_heads),
        "rms_norm_eps": keys.number("rms_norm_eps", 1e-6),
        "attention_bias": keys.flag("attention_bias", False),
        "mlp_bias": keys.flag("mlp_bias", False),
        "rope": rope,
        "eagle3": Eagle3Shape(
            vocab_size=keys.integer("draft_vocab_size", model.vocab_size, maximum=model.vocab_size),
            layers=_layers(keys, model.num_layers),
            goes_on_normed=keys.flag("norm_before_residual", False),
        ),
    }
    identity = identity_of({**fields, "model": model.identity}, folder.checkpoint, model.seed)
    fields["rope"] = rope.at_length(model.max_model_len, fields["head_dim"])
    return replace(
        model,
        **fields,
        folder=folder.path,
        rules=RULES,
        identity=identity,
        num_layers=1,
        layer_windows=(None,),
        window_rope=None,
        full_heads=None,
        window_heads=None,
        kv_sources=(),
        latent=None,
        linear=None,
        mamba=None,
        moe=None,
        layer_inputs=None,
        rotary_fraction=1.0,
        rotated_layers=(),
        query_growth=None,
        tie_word_embeddings=False,
        num_draft_layers=0,
        num_stored_draft_layers=0,
        quantization=None,
        cache_dtype=model.dtype,
        has_cache_scales=False,
        scales=Scales(),
        is_text_part=False,
    )


def _check(keys: Keys, model: ModelConfig) -> None:
    """Raise `ModelError` if the head is for another model, or needs something that `layers.eagle3` does not compute."""
    same = {
        "hidden_size": model.hidden_size,
        "target_hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "num_hidden_layers": 1,
    }
    for name, only in same.items():
        if keys.integer(name, only) != only:
            raise UnsupportedModel(f"config.json: {name} is {keys.values[name]}, must be {only} for this model")
    if (activation := keys.values.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModel(f"config.json: hidden_act {activation!r} is not supported, only 'silu'")
    if keys.values.get("quantization_config"):
        raise UnsupportedModel("config.json: quantized weights of EAGLE-3 heads are not supported")


def _layers(keys: Keys, num_layers: int) -> tuple[int, ...]:
    """Return the model's layers whose inputs the head reads: by its config, else an early, a middle and a late one."""
    given = keys.values.get("eagle_config") or {}
    if not isinstance(given, dict):
        raise InvalidModelConfig("config.json: 'eagle_config' must be an object")
    if given.get("use_aux_hidden_state", True) is not True:
        raise UnsupportedModel("config.json: eagle_config.use_aux_hidden_state false is not supported")
    layers = given.get("eagle_aux_hidden_state_layer_ids") or [2, num_layers // 2, num_layers - 3]
    is_list = isinstance(layers, list) and all(isinstance(each, int) for each in layers)
    if not is_list or any(not 0 <= each < num_layers for each in layers):
        raise UnsupportedModel(f"config.json: an EAGLE-3 head reads layers {layers}, and the model has {num_layers}")
    return tuple(layers)
