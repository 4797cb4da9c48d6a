"""Checks of speculation against what it cannot be combined with yet: each refusal with its reason, in one place."""

from __future__ import annotations

from ..config import EngineConfig, InvalidEngineConfig
from ..hf_config.model_config import ModelConfig

# Whether models with recurrent states get drafts on a GPU. Their kernels are interpreted in tests, and compiled, and
# have not run on one.
WITH_STATES_ON_GPU = False


def check_speculation(model: ModelConfig, config: EngineConfig, device: str | None = None) -> None:
    """Raise `InvalidEngineConfig` where this engine cannot check drafts.

    `device`: "cpu" or "cuda", where it is known better than the config says.
    """
    if config.speculative_config is None:
        return
    reason = _refusal(model, config, device or config.device)
    if reason is not None:
        raise InvalidEngineConfig("speculative_config", f"must be left out: {reason}")


def _refusal(model: ModelConfig, config: EngineConfig, device: str) -> str | None:
    if model.has_states and device == "cuda" and not WITH_STATES_ON_GPU:
        return f"{model.architecture} keeps recurrent states, and on a GPU these do not follow drafts yet"
    if config.data_parallel_size > 1 and device == "cuda":
        return f"data_parallel_size is {config.data_parallel_size}, and ranks with GPUs do not agree about drafts yet"
    return None
