"""The tokens of every request that owns a row."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.step import RowStart


class Rows:
    """Prompt, then output tokens of each row. What a step samples lands here at once: the next step may read it.

    The first `prompt_lens[row]` of `tokens[row]` are the prompt. How many are valid is what the plans say.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        # numpy gets zeroed pages from the system and touches none, so a large product costs address space, not memory.
        self.tokens: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.token_tensor = torch.from_numpy(self.tokens)  # the same memory
        self.prompt_lens = [0] * max_num_seqs

    def start(self, start: RowStart) -> None:
        prompt_len = len(start.prompt_token_ids)
        length = prompt_len + len(start.output_token_ids)
        self.tokens[start.row, :prompt_len] = start.prompt_token_ids
        self.tokens[start.row, prompt_len:length] = start.output_token_ids
        self.prompt_lens[start.row] = prompt_len

    def write(self, rows: NDArray[np.int64], positions: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Token `token_ids[i]` becomes number `positions[i]` of row `rows[i]`.

        A row that drew none gets token 0: a step that is planned already goes on from it.
        """
        self.tokens[rows, positions] = np.maximum(token_ids, 0)

    def prompt_after(self, row: int, start: int, num_tokens: int) -> torch.Tensor:
        """The token that follows each of `num_tokens` tokens from `start` on, as far as the prompt goes; int64."""
        last = min(start + num_tokens, self.prompt_lens[row] - 1)
        return self.token_tensor[row, start + 1 : last + 1].to(torch.int64)
