"""The tensors that a step reads and writes beside the model's own, allocated once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

PIECE = 1024  # int32 values that one program of `apply_writes` moves at most
REJECTED = -2  # stands in a page for the draws behind a draft that was wrong


@dataclass(frozen=True)
class StepTables:
    """The state of each row that persists from step to step."""

    tokens: Tensor  # [num_rows, max_model_len] int32: prompt, then output
    blocks: Tensor  # [groups, num_rows, max_blocks] int32: tokens 16 i ... 16 i + 15 lie in block blocks[g, row, i]
    computed: Tensor  # [num_rows] int32: tokens whose KV exists; a step begins behind them and moves them on
    block_size: int


@dataclass(frozen=True)
class StepBatch:
    """The rows that a step runs, all int32. Sequences that only pad a captured step to its size have row -1."""

    rows: Tensor  # [num_seqs]
    query_start: Tensor  # [num_seqs + 1]  padding sequences begin and end where the real tokens end
    samples: Tensor  # [num_seqs]  not 0 where the step's tokens reach the row's last, so that a token is drawn
    # [num_seqs + 1]  of steps with drafts: draws draw_start[i] ... draw_start[i + 1] - 1 are behind the sequence's last
    # tokens. One that draws nothing has one entry, padding has none.
    draw_start: Tensor


@dataclass(frozen=True)
class StepBuffers:
    """The inputs of one step, by sequence [S] and by token [T].

    A padding sequence has length 0, table row 0 and wants token 0; a padding token has id 0, position 0 and slot -1.
    """

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int64
    slots: Tensor  # [groups, T] int64: where the token's KV goes in each cache group
    seq_lens: Tensor  # [S] int32: tokens of the row whose KV exists after the step
    table_rows: Tensor  # [S] int32
    last_tokens: Tensor  # [S] int64: index of each sequence's last token in the step


@dataclass(frozen=True)
class RowGuesses:
    """Guesses of tokens that rows have not drawn yet."""

    token_ids: Tensor  # [num_rows, width] int32
    first: Tensor  # [num_rows] int32: the index in the row of the first guess


@dataclass(frozen=True)
class DrawPlaces:
    """The places of the D tokens that a step with drafts draws. Entries of which nothing is drawn have row -1."""

    rows: Tensor  # [D] int32
    positions: Tensor  # [D] int32: tokens of the row that precede it
    tokens: Tensor  # [D] int64: the token of the step behind which it is drawn; 0 for padding


@dataclass(frozen=True)
class OutputRing:
    """Drawn tokens on their way to the CPU: pages of pinned memory that steps write in turn."""

    pages: Tensor  # [num_pages, max_num_draws] int32
    turn: Tensor  # [1] int32, on the device: the page that the next step writes
