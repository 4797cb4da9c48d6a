"""Reads a model's configuration from its folder: config.json, generation_config.json and the headers of its weights.

Imports neither torch nor transformers, so that a model's context length or stop tokens can be read in milliseconds.
From a checkpoint of a multimodal model, only the text model is read (`text_part.py`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from .attention import HeadShape, LatentShape, read_layer_windows
from .checkpoint import Checkpoint
from .errors import InvalidModelConfig, MaxModelLenTooLong, UnsupportedArchitecture, UnsupportedModel
from .experts import checked_experts
from .folder import ModelFolder, read_eos_token_ids, read_generation
from .keys import Keys
from .model_config import DTYPES, LOAD_FORMATS, ConfigRules, ModelConfig, Scales
from .quantization import read_quantization
from .rope import NO_ROPE, ProportionalRope, Rope, default_positions, reachable_positions
from .rope_reader import read_query_growth, read_rope, read_ropes_by_window, read_rotary_fraction
from .text_part import text_config, text_part

_DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_MAX_LAYERS = 10_000  # far above any model; a typo in a config must not exhaust the memory


def read_config(
    architectures: Callable[[], Mapping[str, ConfigRules]],
    folder: str | Path,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    load_format: str = "auto",
    seed: int = 0,
) -> ModelConfig:
    """Return the configuration of the checkpoint in `folder`, read by the rules of its architecture.

    `dtype` "auto" is the checkpoint's own. `max_model_len` defaults to the model's positions; a rope with linear or
    dynamic scaling allows `factor` times as many. `load_format` "auto" and "safetensors" load the weights in the
    folder; "dummy" draws random weights from `seed` and needs only config.json. How an engine caches and drafts is not
    read here: it is chosen afterwards (`ModelConfig.with_fp8_cache`, `with_draft_layers`, `window_caches`).

    Raises `ModelError`.
    """
    _require_choice("load_format", load_format, LOAD_FORMATS)
    _require_choice("dtype", dtype, ("auto", *DTYPES))
    files = ModelFolder.open(Path(folder), with_weights=load_format != "dummy")
    rules, is_text_part = _rules(files.config, architectures())
    if is_text_part:
        files = text_part(files)
    given = {rules.key_names.get(name, name): value for name, value in files.config.items()}
    if given.get("rope_parameters") is None:  # null stands for the family's own, as in transformers
        given.pop("rope_parameters", None)
    keys = Keys("config.json", {**rules.defaults, **given})
    computed = _computed_fields(files, rules, keys)
    computed_in = _dtype(dtype, keys, files.checkpoint)
    max_positions = keys.integer("max_position_embeddings")
    max_model_len = _max_model_len(max_model_len, computed["rope"], max_positions)
    for name, heads in (("rope", "full_heads"), ("window_rope", "window_heads")):
        if computed[name] is not None:
            computed[name] = computed[name].at_length(max_model_len, _rotary_dim(computed, computed.get(heads)))
    config = ModelConfig(
        folder=files.path,
        rules=rules,
        **computed,
        cache_dtype=computed_in,
        has_cache_scales=files.checkpoint is not None and files.checkpoint.has_cache_scales,
        num_draft_layers=_num_draft_layers(keys),
        dtype=computed_in,
        max_model_len=max_model_len,
        eos_token_ids=read_eos_token_ids(files, keys.values, computed["vocab_size"]),
        generation=read_generation(files.generation),
        load_format=load_format,
        seed=seed,
        identity=identity_of(computed, files.checkpoint, seed),
        is_text_part=is_text_part,
    )
    return dataclasses.replace(config, num_stored_draft_layers=_num_stored_draft_layers(config, files.checkpoint))


def _num_stored_draft_layers(config: ModelConfig, checkpoint: Checkpoint | None) -> int:
    """Return how many of the draft layers have tensors in the checkpoint. All have dummy weights if there is none."""
    rules = config.rules.draft
    if rules is None or checkpoint is None:
        return config.num_draft_layers
    for number in range(config.num_draft_layers):
        path = rules.path(config, number)
        if not any(name.startswith(f"{path}.") for name in checkpoint.entries):
            return number
    return config.num_draft_layers


def _require_choice(name: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise InvalidModelConfig(f"{name} is {given!r}, must be one of {', '.join(allowed)}")


def _rules(raw: Mapping[str, Any], architectures: Mapping[str, ConfigRules]) -> tuple[ConfigRules, bool]:
    """Return the rules of the first known architecture in config.json, and whether it is the text part of that one."""
    given = raw.get("architectures") or []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise InvalidModelConfig(f"config.json: 'architectures' must be a list of names, not {given!r}")
    multimodal: dict[str, dict[str, ConfigRules]] = {}  # architecture -> model_type of its text part -> rules
    for rules in architectures.values():
        for name, model_type in rules.multimodal.items():
            multimodal.setdefault(name, {})[model_type] = rules
    for name in given:
        if name in architectures:
            return architectures[name], False
        if name in multimodal:
            kind = text_config(raw).get("model_type")
            if kind not in multimodal[name]:
                raise UnsupportedModel(
                    f"config.json: a text_config of model_type {kind!r} is not supported in {name}, only "
                    f"{', '.join(sorted(multimodal[name]))}"
                )
            return multimodal[name][kind], True
    raise UnsupportedArchitecture(given, [*architectures, *multimodal])


def _computed_fields(folder: ModelFolder, rules: ConfigRules, keys: Keys) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that determine what the layers compute."""
    _refuse_what_no_layer_computes(keys, rules)
    latent = None if rules.latent is None else rules.latent(keys)
    shape = _shape_fields(keys, latent, rules)
    num_layers = shape["num_layers"]
    windows = read_layer_windows(rules.windows, keys, num_layers)
    moe = None if rules.experts is None else rules.experts(keys, num_layers)
    if moe is not None:
        _refuse_others("scoring_func", moe.scoring, keys, rules)
    scales = rules.scales(keys)
    _refuse_caps_that_are_not_read(keys, scales, rules)
    return {
        "architecture": rules.architecture,
        **shape,
        **_rope_fields(rules, keys, windows),
        **_family_fields(rules, keys, shape, windows),
        "latent": latent,
        "rms_norm_eps": keys.number(rules.norm_eps_key, 1e-6),
        "attention_bias": keys.flag("attention_bias", False),
        "mlp_bias": keys.flag("mlp_bias", False),
        "tie_word_embeddings": keys.flag("tie_word_embeddings", False),
        "scales": scales,
        "quantization": read_quantization(keys, folder.tensors),
        "moe": None if moe is None else checked_experts(moe, folder.tensors),
        "layer_windows": windows,
    }


def _rope_fields(rules: ConfigRules, keys: Keys, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """Return the fields about ropes, and about the layers that have none. A config without rotation needs no rope."""
    max_positions, partly_rotated = keys.integer("max_position_embeddings"), rules.rotary_fraction is not None
    rotated = () if rules.rotated_layers is None else rules.rotated_layers(keys, windows)
    if rotated and not any(rotated):
        return {"rope": NO_ROPE, "window_rope": None}
    window_rope = None
    if rules.windows is not None and rules.windows.own_rope:
        rope, window_rope = read_ropes_by_window(keys.values, max_positions, partly_rotated=partly_rotated)
    else:
        rope = read_rope(keys.values, max_positions, partly_rotated=partly_rotated)
    if ProportionalRope in (type(rope), type(window_rope)) and (partly_rotated or rules.latent is not None):
        raise UnsupportedModel(f"config.json: rope_type 'proportional' is not supported for {rules.architecture}")
    return {"rope": rope, "window_rope": window_rope, **({"rotated_layers": rotated} if rotated else {})}


def _family_fields(
    rules: ConfigRules, keys: Keys, shape: Mapping[str, int], windows: tuple[int | None, ...]
) -> dict[str, Any]:
    """Return the fields that only some families set. Fields left at their defaults do not change `identity_of`."""
    fields: dict[str, Any] = {}
    if rules.linear is not None:
        fields["linear"] = rules.linear(keys, shape["num_layers"])
    if rules.heads is not None:
        fields["full_heads"], fields["window_heads"] = rules.heads(keys)
    if rules.kv_sources is not None:
        fields["kv_sources"] = rules.kv_sources(keys, windows)
        fields["doubles_shared_mlps"] = keys.flag("use_double_wide_mlp", False)
    if rules.grows_queries:
        fields["query_growth"] = read_query_growth(keys.values)
    if rules.layer_inputs is not None:
        fields["layer_inputs"] = rules.layer_inputs(keys)
    if rules.mamba is not None:
        fields["mamba"] = rules.mamba(keys, shape["num_layers"])
    if rules.attention.qk_norm_key is not None:
        fields["norms_heads"] = keys.flag(rules.attention.qk_norm_key, False)
    if rules.rotary_fraction is not None:
        default = rules.rotary_fraction
        if rules.rotary_dim_key is not None:
            default = keys.integer(rules.rotary_dim_key, shape["head_dim"], shape["head_dim"]) / shape["head_dim"]
        fraction = read_rotary_fraction(keys.values, default)
        if (rotated := int(shape["head_dim"] * fraction)) < 2 or rotated % 2:
            raise InvalidModelConfig(
                f"config.json: partial_rotary_factor {fraction} of head_dim {shape['head_dim']} must be an even number"
            )
        fields["rotary_fraction"] = fraction
    return fields


def _rotary_dim(computed: Mapping[str, Any], heads: HeadShape | None) -> int:
    """Return how many dimensions of a head rotate. `heads` are those of the layers in question if layers differ."""
    if computed["latent"] is not None:
        return int(computed["latent"].rope_dim)
    head_dim = computed["head_dim"] if heads is None else heads.key_dim
    return int(head_dim * computed.get("rotary_fraction", 1.0))


def _refuse_what_no_layer_computes(keys: Keys, rules: ConfigRules) -> None:
    computed = rules.activation
    activation = keys.values.get(rules.activation_key) or computed
    if activation != computed and (activation, computed) != ("swish", "silu"):  # two names of one function
        raise UnsupportedModel(
            f"config.json: {rules.activation_key} {activation!r} is not supported, only {computed!r}"
        )
    for name, only in rules.only.items():
        _refuse_others(name, only, keys, rules)
    of_images = keys.values.get("use_bidirectional_attention") == "vision"  # attention of text tokens is still causal
    if not of_images and keys.values.get("use_bidirectional_attention") not in (None, False):
        raise UnsupportedModel(
            "config.json: use_bidirectional_attention is not supported: tokens see those before them"
        )


def _refuse_caps_that_are_not_read(keys: Keys, scales: Scales, rules: ConfigRules) -> None:
    for name, cap in (("attn_logit_softcapping", scales.score_cap), ("final_logit_softcapping", scales.logit_cap)):
        if cap is None:
            _refuse_others(name, None, keys, rules)


def _refuse_others(name: str, only: Any, keys: Keys, rules: ConfigRules) -> None:
    """Raise `UnsupportedModel` if the config has a key with another value than `only`, or null."""
    given = keys.values.get(name)
    if given not in (None, only):
        raise UnsupportedModel(
            f"config.json: {name} {_as_given(given)} is not supported for {rules.architecture}, only {_as_given(only)}"
        )


def _as_given(value: Any) -> str:
    """Return a value for a message: null, true and false as in JSON."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _shape_fields(keys: Keys, latent: LatentShape | None, rules: ConfigRules) -> dict[str, int]:
    num_heads = keys.integer("num_attention_heads")
    hidden_size = keys.integer("hidden_size")
    num_kv_heads = keys.integer("num_key_value_heads", num_heads)
    if latent is None and keys.values.get("head_dim") is None and hidden_size % num_heads:
        raise InvalidModelConfig(
            f"config.json: without a head_dim, hidden_size ({hidden_size}) must be a multiple of "
            f"num_attention_heads ({num_heads})"
        )
    head_dim = keys.integer("head_dim", hidden_size // num_heads) if latent is None else latent.head_dim
    if num_heads % num_kv_heads:
        raise InvalidModelConfig(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    if head_dim % 2:
        raise InvalidModelConfig(f"config.json: head_dim ({head_dim}) must be even for rotary embeddings")
    return {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer(rules.mlp_width_key),
        "num_layers": _num_layers(keys, rules),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }


def _num_layers(keys: Keys, rules: ConfigRules) -> int:
    if rules.num_layers is not None:
        return rules.num_layers(keys)
    return keys.integer("num_hidden_layers", maximum=_MAX_LAYERS)


def _num_draft_layers(keys: Keys) -> int:
    name = next((name for name in _DRAFT_LAYERS if keys.values.get(name) is not None), _DRAFT_LAYERS[0])
    count = keys.optional_integer(name, 0) or 0
    if not 0 <= count <= _MAX_LAYERS:
        raise InvalidModelConfig(f"config.json: {name!r} must be from 0 to {_MAX_LAYERS}, not {count}")
    return count


def _dtype(asked: str, keys: Keys, checkpoint: Checkpoint | None) -> str:
    if asked != "auto":
        return asked
    stored = None if checkpoint is None else checkpoint.dtype
    found = keys.values.get("dtype") or keys.values.get("torch_dtype") or stored or "float32"
    if found not in DTYPES:
        raise UnsupportedModel(f"config.json: dtype {found!r} is not supported; ask for one of {', '.join(DTYPES)}")
    return str(found)


def _max_model_len(asked: int | None, rope: Rope, max_positions: int) -> int:
    if asked is None:
        return default_positions(rope, max_positions)
    limit = reachable_positions(rope, max_positions)
    if asked < 1:
        raise InvalidModelConfig(f"max_model_len is {asked}, must be at least 1")
    if asked > limit:
        raise MaxModelLenTooLong(asked, limit)
    return asked


def identity_of(computed: Mapping[str, Any], checkpoint: Checkpoint | None, seed: int) -> str:
    """Return a hash of the computation and the weights, without paths, file layout, or keys that change no result."""
    plain = {name: _plain(value) for name, value in computed.items()}
    weights = f"dummy weights of seed {seed}" if checkpoint is None else checkpoint.fingerprint()
    text = json.dumps([plain, weights], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value as JSON for the hash. Of a dataclass, leave out `NEWER` fields at their default."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    new = {
        each.name for each in fields(value) if "newer" in each.metadata and getattr(value, each.name) == each.default
    }
    return {"kind": type(value).__name__, **{name: kept for name, kept in asdict(value).items() if name not in new}}
