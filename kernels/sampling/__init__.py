"""Sampling of the next token. `reference.py` defines it; `batch.py` describes the rows of a step."""

from torch import Tensor

from . import cpu, reference
from .batch import (
    NO_TOKEN,
    ROW_WORDS,
    AllowedTokens,
    BadWords,
    BannedTokens,
    LogitBias,
    Penalties,
    SamplingBatch,
    TokenHistory,
    decode_rows,
    encode_row,
)
from .batch_builder import SamplingRequest, SamplingRows

__all__ = [
    "NO_TOKEN",
    "ROW_WORDS",
    "AllowedTokens",
    "BadWords",
    "BannedTokens",
    "LogitBias",
    "Penalties",
    "SamplingBatch",
    "SamplingRequest",
    "SamplingRows",
    "TokenHistory",
    "encode_row",
    "sample",
    "sample_rows",
]


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw one token per row: `logits` [R, V] of any float type, which are not changed, to token ids [R] int64.

    A row's token depends only on its own logits, parameters, seed and position, not on other rows or the machine. NaN
    counts as minus infinity; a row with nothing else gives `NO_TOKEN`. Does not synchronize with the device.
    """
    if logits.is_cuda:
        from . import gpu

        return gpu.sample(logits, batch)
    if logits.device.type == "cpu":
        return cpu.sample(logits.float(), batch)
    return reference.sample(logits.float(), batch)


def sample_rows(logits: Tensor, table: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Draw like `sample`, but with parameters from a table: `logits` [R, V] of any float type to token ids [R] int64.

    Row i of the logits has its parameters in row `rows[i]` of `table` [num_rows, ROW_WORDS] int32, written by
    `encode_row`; -1 is padding and gives token 0. `positions[i]` tokens precede the drawn one. `rows` and `positions`
    are [R] int32 or int64. On a GPU, a CUDA graph may capture it.
    """
    if logits.is_cuda:
        from . import gpu

        return gpu.sample_rows(logits, table, rows, positions)
    return sample(logits, decode_rows(table, rows, positions)).masked_fill(rows < 0, 0)
