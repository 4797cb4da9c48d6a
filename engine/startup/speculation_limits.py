"""Checks of speculation against what it cannot be combined with yet: each refusal with its reason, in one place."""

from __future__ import annotations

from ..config import EngineConfig, InvalidEngineConfig
from ..hf_config.model_config import ModelConfig


def check_speculation(model: ModelConfig, config: EngineConfig, device: str) -> None:
    """Raise `InvalidEngineConfig` where this engine cannot make or check drafts.

    `device` is "cpu" or "cuda"; "auto" where it is not known yet.
    """
    if config.speculative_config is None:
        return
    reason = _refusal(model, config, device)
    if reason is not None:
        raise InvalidEngineConfig("speculative_config", f"must be left out: {reason}")


def _refusal(model: ModelConfig, config: EngineConfig, device: str) -> str | None:
    if model.has_states:
        return f"{model.architecture} keeps recurrent states, which a rejected draft would have changed"
    if config.runs_draft_layer and device == "cuda":
        return "draft layers guess on CPUs alone so far; 'suffix' and 'ngram' do on GPUs"
    if config.data_parallel_size > 1:
        return f"data_parallel_size is {config.data_parallel_size}, and ranks do not agree about drafts yet"
    return None
