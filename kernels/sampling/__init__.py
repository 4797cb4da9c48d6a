"""Sampling of the next token: `reference.py` defines it, `batch.py` describes the rows of a step."""

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
    """Draw one token a row: `logits` `[R, V]` of any float type, unchanged, to token ids `[R]` int64.

    A row's token depends on its own logits, parameters, seed and position only: neither on the rows beside it nor on
    the machine. NaN counts as minus infinity; a row of nothing else gives `NO_TOKEN`. Waits for no device.
    """
    if logits.is_cuda:
        from . import gpu

        return gpu.sample(logits, batch)
    if logits.device.type == "cpu":
        return cpu.sample(logits.float(), batch)
    return reference.sample(logits.float(), batch)


def sample_rows(logits: Tensor, table: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Draw as `sample` does, for rows whose parameters lie in a table: `logits` `[R, V]` of any float type to `[R]`
    int64.

    Row i of the logits belongs to row `rows[i]` of `table` `[num_rows, ROW_WORDS]` int32, which holds what `encode_row`
    gives; -1 is padding and gives token 0. `positions[i]` tokens precede the one that is drawn. `rows` and `positions`
    are `[R]` int32 or int64. On a GPU it asks nothing of the host, so that it can be part of a captured graph.
    """
    if logits.is_cuda:
        from . import gpu

        return gpu.sample_rows(logits, table, rows, positions)
    return sample(logits, decode_rows(table, rows, positions)).masked_fill(rows < 0, 0)
