"""Which blocks hold the KV of each row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..core.layout import BLOCK_SIZE


class BlockTables:
    """Block ids of every row, in the order of the row's tokens.

    `table[row, i]` holds tokens `16 i ... 16 i + 15`; entries from `counts[row]` on are leftovers that nobody reads.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int) -> None:
        self.table: NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)
        self.counts = [0] * max_num_seqs

    @property
    def max_tokens(self) -> int:
        """That a row's blocks can hold."""
        return self.table.shape[1] * BLOCK_SIZE

    def start(self, row: int, block_ids: list[int]) -> None:
        self.counts[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: list[int]) -> None:
        first = self.counts[row]
        self.counts[row] = first + len(block_ids)
        self.table[row, first : self.counts[row]] = block_ids
