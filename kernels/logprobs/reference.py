"""Reference of log-probabilities of chosen and best tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `baton.kernels.logprobs.token_logprobs`. Needs one temporary of the logits' shape at a time."""
    normalizer = logits.float().logsumexp(dim=-1, keepdim=True)
    chosen_logits = logits.gather(1, token_ids[:, None])
    rank = 1 + (logits > chosen_logits).sum(dim=-1)
    top_logits, top_ids = logits.topk(k, dim=-1) if k else (logits[:, :0], torch.empty_like(token_ids)[:, None][:, :0])
    return (chosen_logits.float() - normalizer)[:, 0], rank, top_ids, top_logits.float() - normalizer
