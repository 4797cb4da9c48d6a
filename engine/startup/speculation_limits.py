"""Checks of speculation against what it cannot be combined with yet: each refusal with its reason, in one place."""

from __future__ import annotations

from ..config import EngineConfig, InvalidEngineConfig
from ..hf_config.model_config import ModelConfig


def check_speculation(model: ModelConfig, config: EngineConfig) -> None:
    """Raise `InvalidEngineConfig` where this engine cannot check drafts."""
    if config.speculative_config is None:
        return
    reason = _refusal(model, config)
    if reason is not None:
        raise InvalidEngineConfig("speculative_config", f"must be left out: {reason}")


def _refusal(model: ModelConfig, config: EngineConfig) -> str | None:
    if model.has_states:
        return f"{model.architecture} keeps recurrent states, which a rejected draft would have changed"
    if config.data_parallel_size > 1:
        return f"data_parallel_size is {config.data_parallel_size}, and ranks do not agree about drafts yet"
    return None
