"""The format of a row's sampling parameters: 32-bit words in a table on the device, which a captured graph reads by
row.

word     0            1      2      3      4         5          6           7
holds    temperature  top_k  top_p  min_p  seed low  seed high  prompt_len  0
as       float32      int32  float32       uint32               int32
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .batch import SamplingBatch

ROW_WORDS = 8
TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED_LOW, SEED_HIGH, PROMPT_LEN = range(7)
_WORD = 0xFFFFFFFF
_GREATEST_TOP_K = 2**31 - 1


class PlainRequest(Protocol):
    """The parameters that every draw needs."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


def encode_row(request: PlainRequest, *, seed: int, prompt_len: int) -> NDArray[np.int32]:
    """Return the `ROW_WORDS` words of a request whose first `prompt_len` tokens are prompt; `seed` is from 0 to 2**63 -
    1.
    """
    words = np.zeros(ROW_WORDS, dtype=np.int32)
    floats = words.view(np.float32)
    floats[TEMPERATURE], floats[TOP_P], floats[MIN_P] = request.temperature, request.top_p, request.min_p
    words[TOP_K], words[PROMPT_LEN] = min(request.top_k, _GREATEST_TOP_K), prompt_len
    words.view(np.uint32)[[SEED_LOW, SEED_HIGH]] = seed & _WORD, seed >> 32
    return words


def encode_batch(batch: SamplingBatch) -> Tensor:
    """Return the words `[R, ROW_WORDS]` int32 of a batch's numbers, on their device and without waiting for it."""
    words = batch.seeds.new_zeros(len(batch.seeds), ROW_WORDS, dtype=torch.int32)
    floats = words.view(torch.float32)
    floats[:, TOP_P] = 1.0 if batch.top_p is None else batch.top_p
    for column, numbers in ((TEMPERATURE, batch.temperature), (MIN_P, batch.min_p)):
        if numbers is not None:
            floats[:, column] = numbers
    if batch.top_k is not None:
        words[:, TOP_K] = batch.top_k.clamp(max=_GREATEST_TOP_K)
    words[:, SEED_LOW], words[:, SEED_HIGH] = batch.seeds, batch.seeds >> 32  # the copy keeps the low bits
    return words


def decode_rows(table: Tensor, rows: Tensor, positions: Tensor) -> SamplingBatch:
    """Return the batch of `rows` `[R]` of a `table` `[num_rows, ROW_WORDS]` int32; a padding row, -1, reads row 0."""
    words = table[rows.clamp(min=0).long()]
    floats = words.view(torch.float32)
    return SamplingBatch(
        seeds=words[:, SEED_LOW : SEED_HIGH + 1].contiguous().view(torch.int64)[:, 0],
        positions=positions.long(),
        temperature=floats[:, TEMPERATURE].contiguous(),
        top_k=words[:, TOP_K].long(),
        top_p=floats[:, TOP_P].contiguous(),
        min_p=floats[:, MIN_P].contiguous(),
    )
