"""The text model in a multimodal checkpoint, read as if it were alone: its config, and its tensors renamed.

config.json    {architectures: [Gemma3ForConditionalGeneration], text_config: {...}, vision_config: {...}, ...}

tensors        model.language_model.layers.0...    model.layers.0...       written by newer versions of transformers
               language_model.model.layers.0...    model.layers.0...       written by older ones
               lm_head, language_model.lm_head     lm_head
               towers, projectors, draft layers    are left out
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .checkpoint import Checkpoint
from .errors import InvalidModelConfig
from .folder import ModelFolder

_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
_KEYS_OF_WHOLE_MODEL = ("tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype", "quantization_config")


def text_part(folder: ModelFolder) -> ModelFolder:
    """Return the folder as if it held the text model only. Raises `ModelError` if there is no `text_config`."""
    checkpoint = None if folder.checkpoint is None else text_tensors(folder.checkpoint)
    return dataclasses.replace(folder, config=text_config(folder.config), checkpoint=checkpoint)


def text_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """Return the tensors of the text model, renamed as if it were alone."""
    entries = {
        own: dataclasses.replace(entry, name=own, renamed_from=entry.name_in_file)
        for name, entry in checkpoint.entries.items()
        if (own := _own_name(name)) is not None
    }
    index = {own: file for name, file in checkpoint.index.items() if (own := _own_name(name)) is not None}
    return Checkpoint(checkpoint.folder, entries, index)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `text_config` of a config.json, with the keys that stand beside it. Raises `InvalidModelConfig`."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise InvalidModelConfig(f"config.json: 'text_config' must be an object for a model of images, not {text!r}")
    given = {name: config[name] for name in _KEYS_OF_WHOLE_MODEL if config.get(name) is not None}
    quantization = given.get("quantization_config")
    if isinstance(quantization, dict):
        given["quantization_config"] = {name: _own_names(value) for name, value in quantization.items()}
    return {**text, **given}


def _own_names(value: Any) -> Any:
    """Rename the layers in a list as in the text model; leave out those that are no part of it."""
    if not isinstance(value, list):
        return value
    return [(_own_name(name) or name) if isinstance(name, str) else name for name in value]


def _own_name(name: str) -> str | None:
    """Return a tensor's name in the text model; None if it is no part of it."""
    for prefix, own in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None
