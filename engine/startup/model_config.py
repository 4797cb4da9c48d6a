"""The model that an engine's arguments name: fetched from the Hub, read, and checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools
import json

from ..config import DTYPES, EngineConfig, InvalidEngineConfig
from ..core.speculation.config import SpeculativeConfig
from ..hf_config.eagle3 import read_eagle3
from ..hf_config.errors import ModelError
from ..hf_config.hub import Files, Progress, model_folder
from ..hf_config.model_config import ModelConfig
from ..models import load_config
from .division import check_division
from .kv_size import check_given_size


def fetch_models(config: EngineConfig, progress: Progress | None = None) -> EngineConfig:
    """Fetch models that are named by their names on the Hub, and return the config with their folders instead.

    `progress` is told about long downloads. Random weights (`load_format` "dummy") need only config.json and the
    tokenizer. Raises `ModelNotFetched`.
    """
    files = Files.TEXT if config.load_format == "dummy" else Files.ALL
    folder_of = functools.partial(model_folder, download_dir=config.download_dir, progress=progress)
    model, tokenizer = folder_of(config.model, files, revision=config.revision), config.tokenizer
    if tokenizer is not None or config.tokenizer_revision is not None:
        tokenizer = str(folder_of(tokenizer or config.model, Files.TEXT, revision=config.tokenizer_revision))
    update: dict[str, object] = {
        "model": str(model),
        "tokenizer": tokenizer,
        **dict.fromkeys(("revision", "tokenizer_revision", "download_dir")),
    }
    speculation = config.speculative_config
    if speculation is not None and speculation.model is not None:
        draft_model = folder_of(speculation.model, files, revision=speculation.revision)
        update["speculative_config"] = speculation.model_copy(update={"model": str(draft_model), "revision": None})
    return config.model_copy(update=update)


def read_model_config(config: EngineConfig) -> ModelConfig:
    """Read the config of the model in the folder `config.model`, and of its draft model, if it has one.

    Raises `ModelError` for a model that cannot be served, `InvalidEngineConfig` if the arguments do not fit the model.
    """
    speculation = config.speculative_config
    model = load_config(
        config.model,
        dtype=DTYPES[config.dtype] or "auto",
        max_model_len=config.max_model_len,
        load_format=config.load_format,
        seed=config.seed,
    )
    model = dataclasses.replace(model, window_caches=not config.disable_hybrid_kv_cache_manager)
    if config.kv_cache_dtype != "auto":
        model = model.with_fp8_cache()
    if speculation is not None and speculation.method == "mtp":
        model = model.with_draft_layers()
    check_division(model, config)
    num_layers = model.num_run_draft_layers
    if speculation is not None and 1 < num_layers < speculation.num_speculative_tokens:
        raise InvalidEngineConfig(
            "speculative_config.num_speculative_tokens",
            f"is {speculation.num_speculative_tokens}, must be at most {num_layers}: each of the model's draft layers "
            "guesses one token",
        )
    if speculation is not None and speculation.model is not None:
        model = _with_draft_model(model, config, speculation)
    check_given_size(model, config)
    return model


def _with_draft_model(model: ModelConfig, config: EngineConfig, speculation: SpeculativeConfig) -> ModelConfig:
    try:
        draft_model = _read_draft_model(model, config, speculation)
        check_division(draft_model, config.model_copy(update={"enable_expert_parallel": False}))
    except (ModelError, InvalidEngineConfig) as error:
        raise InvalidEngineConfig("speculative_config.model", str(error)) from error
    if draft_model.eagle3 is None:
        _check_draft_model(model, draft_model)
    return dataclasses.replace(model, draft_model=draft_model)


def _read_draft_model(model: ModelConfig, config: EngineConfig, speculation: SpeculativeConfig) -> ModelConfig:
    assert speculation.model is not None, "a config whose method has a checkpoint of its own"
    folder = model_folder(
        speculation.model, Files.TEXT, revision=speculation.revision, download_dir=config.download_dir
    )
    if speculation.method == "eagle3":
        return read_eagle3(folder, model)
    draft_model = load_config(
        folder,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        load_format=config.load_format,
        seed=config.seed,
    )
    return dataclasses.replace(draft_model, window_caches=model.window_caches)


def _check_draft_model(model: ModelConfig, draft_model: ModelConfig) -> None:
    """Raise `InvalidEngineConfig` if the two models' tokens differ, or if the draft model has recurrent states.

    Such states cannot be taken back when a draft is rejected.
    """
    reason = None
    if draft_model.has_states:
        reason = f"{draft_model.architecture} keeps recurrent states, which a rejected draft would have changed"
    elif draft_model.vocab_size != model.vocab_size:
        reason = f"its vocabulary has {draft_model.vocab_size} tokens, and the model's {model.vocab_size}"
    elif not _have_same_tokens(model, draft_model):
        reason = "its tokenizer.json has other tokens than the model's"
    if reason is not None:
        raise InvalidEngineConfig("speculative_config.model", f"cannot draft for the model: {reason}")


def _have_same_tokens(model: ModelConfig, draft_model: ModelConfig) -> bool:
    """Return whether two models give the same numbers to their tokens, as far as their folders tell."""
    texts = [folder / "tokenizer.json" for folder in (model.folder, draft_model.folder)]
    if not all(text.exists() for text in texts):
        return True
    first, second = (text.read_bytes() for text in texts)
    return first == second or _tokens(first) == _tokens(second)


def _tokens(text: bytes) -> object:
    """Return the tokens of a tokenizer.json with their numbers; the pieces of a Unigram model are in order instead."""
    tokenizer = json.loads(text)
    return tokenizer.get("model", {}).get("vocab")
