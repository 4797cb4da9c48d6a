"""The text model inside a checkpoint that also reads images: its config, and its tensors under the names it has alone.

config.json    {architectures: [Gemma3ForConditionalGeneration], text_config: {...}, vision_config: {...}, ...}

tensors        model.language_model.layers.0...    model.layers.0...       as transformers has written them lately
               language_model.model.layers.0...    model.layers.0...       and before
               lm_head, language_model.lm_head     lm_head
               towers, projectors, draft layers    are left out
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .checkpoint import Checkpoint
from .errors import InvalidModelConfig, UnsupportedModel
from .folder import ModelFolder

_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
_OF_THE_WHOLE = ("tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype", "quantization_config")


def text_part(folder: ModelFolder, kinds: Mapping[str, str]) -> ModelFolder:
    """Return the folder as if it held the text model only.

    `kinds`: the `model_type` that the text of each architecture must have. Raises `ModelError` for another one, and
    without a `text_config`.
    """
    checkpoint = None if folder.checkpoint is None else text_tensors(folder.checkpoint)
    config = _text_config(folder.config)
    expected = {kinds[name] for name in folder.config["architectures"] if name in kinds}
    if config.get("model_type") not in expected:
        raise UnsupportedModel(
            f"config.json: a text_config of model_type {config.get('model_type')!r} is not supported in "
            f"{folder.config['architectures']}, only {', '.join(sorted(expected))}"
        )
    return dataclasses.replace(folder, config=config, checkpoint=checkpoint)


def text_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """Return the tensors of the text model, under the names that it has alone."""
    entries = {
        own: dataclasses.replace(entry, name=own, renamed_from=name)
        for name, entry in checkpoint.entries.items()
        if (own := _own_name(name)) is not None
    }
    index = {own: file for name, file in checkpoint.index.items() if (own := _own_name(name)) is not None}
    return Checkpoint(checkpoint.folder, entries, index)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise InvalidModelConfig(f"config.json: 'text_config' must be an object for a model of images, not {text!r}")
    given = {name: config[name] for name in _OF_THE_WHOLE if config.get(name) is not None}
    return {**text, **given}


def _own_name(name: str) -> str | None:
    """Return the name that a tensor has in the text model; None where it is no part of it."""
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None
