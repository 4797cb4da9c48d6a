"""The model that an engine's arguments name, read and checked before anything of it is loaded."""

from __future__ import annotations

import dataclasses

from ..config import DTYPES, EngineConfig, InvalidEngineConfig
from ..core.speculation.config import SpeculativeConfig
from ..hf_config.eagle3 import read_eagle3
from ..hf_config.errors import ModelError
from ..hf_config.hub import Files, model_folder
from ..hf_config.model_config import ModelConfig
from ..models import load_config
from .division import check_division
from .speculation_limits import check_draft_model, check_speculation


def read_model_config(config: EngineConfig) -> ModelConfig:
    """Read the config of the model in the folder `config.model`, and of its draft model where it has one.

    Raises `ModelError` for a model that cannot be served, `InvalidEngineConfig` where the arguments do not fit it.
    """
    speculation = config.speculative_config
    model = load_config(
        config.model,
        dtype=DTYPES[config.dtype] or "auto",
        max_model_len=config.max_model_len,
        load_format=config.load_format,
        kv_cache_dtype=config.kv_cache_dtype,
        seed=config.seed,
        window_caches=not config.disable_hybrid_kv_cache_manager,
        drafts=speculation is not None and speculation.method == "mtp",
    )
    check_division(model, config)
    check_speculation(model, config, config.device)
    if speculation is None or speculation.model is None:
        return model
    try:
        draft_model = _read_draft_model(model, config, speculation)
        check_division(draft_model, config.model_copy(update={"enable_expert_parallel": False}))
    except (ModelError, InvalidEngineConfig) as error:
        raise InvalidEngineConfig("speculative_config.model", str(error)) from error
    if draft_model.eagle3 is None:
        check_draft_model(model, draft_model)
    return dataclasses.replace(model, draft_model=draft_model)


def _read_draft_model(model: ModelConfig, config: EngineConfig, speculation: SpeculativeConfig) -> ModelConfig:
    assert speculation.model is not None, "a config whose method has a checkpoint of its own"
    folder = model_folder(
        speculation.model, Files.TEXT, revision=speculation.revision, download_dir=config.download_dir
    )
    if speculation.method == "eagle3":
        return read_eagle3(folder, model)
    return load_config(
        folder,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        load_format=config.load_format,
        seed=config.seed,
        window_caches=not config.disable_hybrid_kv_cache_manager,
    )
