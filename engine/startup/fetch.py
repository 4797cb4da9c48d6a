"""The first step of a start: names of the Hub in an engine's arguments become folders of this machine."""

from __future__ import annotations

from ..config import EngineConfig
from ..hf_config.hub import Files, Progress, model_folder


def fetch_models(config: EngineConfig, progress: Progress | None = None) -> EngineConfig:
    """Return the config with folders in place of names of the Hub, having fetched what of these is not here.

    `progress` is told how far a long download is. Random weights (`load_format` "dummy") need config.json and the
    tokenizer alone. Raises `ModelNotFetched`.
    """
    files = Files.TEXT if config.load_format == "dummy" else Files.ALL
    model = model_folder(
        config.model, files, revision=config.revision, download_dir=config.download_dir, progress=progress
    )
    tokenizer = config.tokenizer
    if tokenizer is not None or config.tokenizer_revision is not None:
        tokenizer = str(
            model_folder(
                tokenizer or config.model,
                Files.TEXT,
                revision=config.tokenizer_revision,
                download_dir=config.download_dir,
            )
        )
    update: dict[str, object] = {
        "model": str(model),
        "tokenizer": tokenizer,
        "revision": None,
        "tokenizer_revision": None,
    }
    speculation = config.speculative_config
    if speculation is not None and speculation.model is not None:
        draft_model = model_folder(
            speculation.model,
            files,
            revision=speculation.revision,
            download_dir=config.download_dir,
            progress=progress,
        )
        update["speculative_config"] = speculation.model_copy(update={"model": str(draft_model), "revision": None})
    return config.model_copy(update=update)
