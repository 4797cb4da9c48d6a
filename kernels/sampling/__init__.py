"""Drawing the next token: see `reference.py` for what is computed, `batch.py` for what a step says about its rows."""

from torch import Tensor

from . import cpu, reference
from .batch import AllowedTokens, BadWords, BannedTokens, LogitBias, Penalties, SamplingBatch, TokenHistory
from .rows import SamplingRequest, SamplingRows

__all__ = [
    "AllowedTokens",
    "BadWords",
    "BannedTokens",
    "LogitBias",
    "Penalties",
    "SamplingBatch",
    "SamplingRequest",
    "SamplingRows",
    "TokenHistory",
    "sample",
]


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Draws one token a row: `logits` `[R, V]` float32, unchanged, to token ids `[R]` int64.

    A row's token depends on its own logits, parameters, seed and position only: neither on the rows beside it nor on
    the machine. NaN counts as minus infinity; a row of nothing else gives token 0.
    """
    if logits.device.type == "cpu":
        return cpu.sample(logits, batch)
    return reference.sample(logits, batch)
