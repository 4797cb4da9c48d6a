"""A step's tensors, small enough for tests to check all of them after each kernel."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

import torch

from baton.kernels.step import DrawPlaces, OutputRing, RowGuesses, StepBatch, StepBuffers, StepTables

ROWS, MODEL_LEN, BLOCK_SIZE = 12, 96, 16
PAGES, GROUPS = 3, 2


@dataclass
class Step:
    """All tensors that the kernels of one step read or write."""

    tables: StepTables
    batch: StepBatch
    inputs: StepBuffers
    ring: OutputRing

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{type(part).__name__}.{field.name}": value
            for part in (self.tables, self.batch, self.inputs, self.ring)
            for field in fields(part)
            if isinstance(value := getattr(part, field.name), torch.Tensor)
        }


def make_step(
    device: torch.device,
    lens: list[int],
    num_seqs: int,
    num_tokens: int,
    seed: int = 0,
    draws: list[int] | None = None,
) -> Step:
    """Return a step of random rows of `lens[i]` tokens, padded to `num_seqs` and `num_tokens`. Outputs are poisoned.

    Row i draws `draws[i]` tokens, by default one after each of its tokens.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(1000, shape, generator=generator).to(device, dtype)

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def poison(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((size,), -77, dtype=dtype, device=device)

    padding = num_seqs - len(lens)
    ends = [sum(lens[:i]) for i in range(len(lens) + 1)]
    drawn = [sum((draws or lens)[:i]) for i in range(len(lens) + 1)]
    rows, computed = rng.sample(range(ROWS), len(lens)), [rng.randrange(MODEL_LEN) for _ in range(ROWS)]
    for row, length in zip(rows, lens, strict=True):
        computed[row] = rng.randrange(MODEL_LEN - 1 - length)
    blocks = integers(GROUPS, ROWS, MODEL_LEN // BLOCK_SIZE)
    return Step(
        StepTables(integers(ROWS, MODEL_LEN), blocks, int32(computed), BLOCK_SIZE),
        StepBatch(
            rows=int32(rows + [-1] * padding),
            query_start=int32(ends + ends[-1:] * padding),
            samples=int32([rng.randrange(2) for _ in lens] + [1] * padding),
            draw_start=int32(drawn + drawn[-1:] * padding),
        ),
        StepBuffers(
            token_ids=poison(num_tokens, torch.int32),
            positions=poison(num_tokens, torch.int64),
            slots=poison(GROUPS * num_tokens, torch.int64).view(GROUPS, num_tokens),
            seq_lens=poison(num_seqs, torch.int32),
            table_rows=poison(num_seqs, torch.int32),
            last_tokens=poison(num_seqs, torch.int64),
        ),
        OutputRing(poison(PAGES * ROWS, torch.int32).view(PAGES, ROWS), int32([0])),
    )


BATCHES = [([1], 1, 1), ([1, 1, 1], 4, 4), ([5, 1, 30, 2], 4, 38), ([3, 7], 9, 40), ([90], 3, 96), ([], 2, 16)]


def make_drafts(
    step: Step, device: torch.device, *, width: int, lag: int, num_draws: int | None = None
) -> tuple[RowGuesses, DrawPlaces]:
    """Return guesses for each row, the first `lag` tokens before the next token to compute, and poisoned places."""
    computed = step.tables.computed
    guesses = torch.arange(ROWS * width, dtype=torch.int32, device=device).view(ROWS, width) + 5000
    size = len(step.inputs.token_ids) if num_draws is None else num_draws
    places = (torch.full((size,), -77, dtype=dtype, device=device) for dtype in (torch.int32, torch.int32, torch.int64))
    return RowGuesses(guesses, computed + 1 - lag), DrawPlaces(*places)


WITH_DRAFTS = [  # tokens and draws of each sequence; number of sequences and of draws, with or without padding
    ([1], [1], 1, 4),
    ([3, 1, 6], [3, 1, 6], 5, 16),
    ([4] * 3, [4] * 3, 3, 12),
    ([1, 3, 20, 2, 30], [1, 3, 1, 1, 1], 6, 9),  # the last three are in prefill
    ([5, 4, 7], [5, 1, 2], 3, 8),
]
