"""Answers that `transformers` computes for the prompts of parity tests."""

from __future__ import annotations

import random
from typing import Any

import torch

PROMPTS = [[random.Random(length).randrange(3, 256) for _ in range(length)] for length in (1, 2, 16, 33, 100)]


@torch.no_grad()
def expected_logprobs(yardstick: Any, token_ids: list[int]) -> torch.Tensor:
    """Return the log probabilities [len(token_ids), vocab] of the next token after each token."""
    return yardstick(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
