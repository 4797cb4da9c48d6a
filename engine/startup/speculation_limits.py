"""Checks of speculation against what it cannot be combined with yet: each refusal with its reason, in one place."""

from __future__ import annotations

import json

from ..config import EngineConfig, InvalidEngineConfig
from ..hf_config.model_config import ModelConfig


def check_speculation(config: EngineConfig) -> None:
    """Raise `InvalidEngineConfig` where this engine cannot make drafts."""
    if config.data_parallel_size > 1 and config.guesses_on_device:
        raise InvalidEngineConfig(
            "speculative_config",
            f"must be left out: data_parallel_size is {config.data_parallel_size}, and ranks do not wait for each other"
            " where they guess; 'suffix' and 'ngram' work",
        )


def check_draft_model(model: ModelConfig, draft_model: ModelConfig) -> None:
    """Raise `InvalidEngineConfig` where one model's tokens say nothing to the other, or it keeps what it cannot take
    back.
    """
    reason = None
    if draft_model.has_states:
        reason = f"{draft_model.architecture} keeps recurrent states, which a rejected draft would have changed"
    elif draft_model.vocab_size != model.vocab_size:
        reason = f"its vocabulary has {draft_model.vocab_size} tokens, and the model's {model.vocab_size}"
    elif not _have_same_tokens(model, draft_model):
        reason = "its tokenizer.json has other tokens than the model's"
    if reason is not None:
        raise InvalidEngineConfig("speculative_config.model", f"cannot guess for the model: {reason}")


def _have_same_tokens(model: ModelConfig, draft_model: ModelConfig) -> bool:
    """Return whether two models give their tokens the same numbers, as far as their folders tell."""
    texts = [folder / "tokenizer.json" for folder in (model.folder, draft_model.folder)]
    if not all(text.exists() for text in texts):
        return True
    first, second = (text.read_bytes() for text in texts)
    return first == second or _tokens(first) == _tokens(second)


def _tokens(text: bytes) -> object:
    """Return the tokens of a tokenizer.json with their numbers; the pieces of a Unigram model are numbered in order."""
    tokenizer = json.loads(text)
    return tokenizer.get("model", {}).get("vocab")
