"""A model's folder: its JSON files, and the sampling defaults and stop tokens in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..absent import FETCH_AGAIN, absent_file
from .checkpoint import Checkpoint
from .errors import InvalidModelConfig
from .keys import Keys

# Describes the weights' quantization, if a version of NVIDIA's Model Optimizer has not written it into config.json.
MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    path: Path
    config: Mapping[str, Any]  # config.json
    generation: Mapping[str, Any]  # generation_config.json; empty without such a file
    tokenizer: Mapping[str, Any]  # tokenizer_config.json; empty without such a file
    checkpoint: Checkpoint | None  # None: opened without weights

    @classmethod
    def open(cls, path: Path, *, with_weights: bool) -> ModelFolder:
        """Read the folder of a model. Raises `ModelError`."""
        config = _read_json(path, "config.json")
        if config.get("quantization_config") is None and (path / MODELOPT_FILE).is_file():
            described = _read_json(path, MODELOPT_FILE).get("quantization")
            config["quantization_config"] = {"quant_method": "modelopt", **_object("quantization", described)}
        return cls(
            path=path,
            config=config,
            generation=_read_if_there(path, "generation_config.json"),
            tokenizer=_read_if_there(path, "tokenizer_config.json"),
            checkpoint=Checkpoint.open(path) if with_weights else None,
        )

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the checkpoint's tensors."""
        return () if self.checkpoint is None else tuple(self.checkpoint.entries)


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidModelConfig(f"{MODELOPT_FILE}: {name!r} must be an object, not {value!r}")
    return value


def _read_if_there(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    return _read_json(folder, name) if path.is_file() or path.is_symlink() else {}


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if path.is_symlink() and not path.exists():
        raise InvalidModelConfig(f"{folder} has no {absent_file(path)}: {FETCH_AGAIN}")
    if not path.is_file():
        raise InvalidModelConfig(
            f"{str(folder)!r} has no {name}: a model is given as a local folder with config.json and *.safetensors "
            "or by its name on the Hub, such as Qwen/Qwen3-0.6B"
        )
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidModelConfig(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidModelConfig(f"{path} must hold an object, not {type(value).__name__}")
    return value


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Default sampling parameters from generation_config.json; None if it does not set them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def read_generation(generation: Mapping[str, Any]) -> GenerationDefaults:
    keys = Keys("generation_config.json", generation)
    return GenerationDefaults(
        temperature=keys.optional_number("temperature"),
        top_p=keys.optional_number("top_p"),
        top_k=keys.optional_integer("top_k"),
        min_p=keys.optional_number("min_p"),
        repetition_penalty=keys.optional_number("repetition_penalty"),
        max_new_tokens=keys.optional_integer("max_new_tokens"),
    )


def read_eos_token_ids(folder: ModelFolder, raw: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the stop tokens: those of generation_config.json or config.json, and the tokenizer's `eos_token`.

    generation_config.json wins over config.json (`raw`): often only it has the end-of-turn tokens. Of some fine-tuned
    models, only the tokenizer has them; vLLM stops there, too. Ids outside the vocabulary (-1 for "none", tokens that a
    cut vocabulary lacks) are left out, since none of them can be sampled.
    """
    ids = list[int]()
    for file, values in (("generation_config.json", folder.generation), ("config.json", raw)):
        value = values.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
                raise InvalidModelConfig(f"{file}: 'eos_token_id' must be an integer or a list of them, not {value!r}")
            break
    return tuple(token for token in dict.fromkeys([*ids, *_eos_of(folder.tokenizer)]) if 0 <= token < vocab_size)


def _eos_of(tokenizer: Mapping[str, Any]) -> list[int]:
    """Return the id of `eos_token`, if the tokens that were added to the vocabulary are listed with their ids."""
    eos, added = tokenizer.get("eos_token"), tokenizer.get("added_tokens_decoder")
    text = eos.get("content") if isinstance(eos, Mapping) else eos
    if not isinstance(text, str) or not isinstance(added, Mapping):
        return []
    return [
        int(number)
        for number, token in added.items()
        if number.isdecimal() and isinstance(token, Mapping) and token.get("content") == text
    ]
