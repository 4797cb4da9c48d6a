"""Runs of chunks, which the scan of Mamba-2 processes in one loop each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from baton.kernels.state_batch import CHUNK, StateBatch, StateCheckpoint

pytest.importorskip("triton")

from baton.kernels.ssd.gpu.chunk_runs import MOST_CHUNKS

from .run_kernel import length_from_each


def lengths(num_tokens: int, checkpoints: Sequence[int], device: torch.device) -> list[int]:
    """Return the length of the run from each chunk on, of one sequence with checkpoints after these tokens."""
    kept = [StateCheckpoint(0, after, slot + 1) for slot, after in enumerate(checkpoints)]
    batch = StateBatch.plan([num_tokens], [0], [0], checkpoints=kept, device=device)
    found = torch.full((batch.num_chunks,), -1, dtype=torch.int32, device=device)
    length_from_each[(batch.num_chunks,)](batch.chunk_start, batch.checkpoints, found, batch.num_chunks, CHUNK=CHUNK)
    return found.tolist()


@pytest.mark.parametrize(
    ("num_tokens", "checkpoints", "expected"),
    [
        (3 * CHUNK, [], [3, 2, 1]),
        (2 * CHUNK + 1, [], [3, 2, 1]),  # the last chunk of a run may be short
        (3 * CHUNK, [CHUNK + 10], [2, 1, 2, 1]),  # one before the last may not
        (3 * CHUNK, [2 * CHUNK], [2, 1, 1]),  # a state is kept in between
        (2 * CHUNK, [2 * CHUNK], [2, 1]),
        (8, [], [1]),
    ],
)
def test_a_run_ends_behind_a_short_chunk_or_a_checkpoint(
    num_tokens: int, checkpoints: list[int], expected: list[int], triton_device: torch.device
) -> None:
    assert lengths(num_tokens, checkpoints, triton_device) == expected


def test_a_run_has_a_largest_length(triton_device: torch.device) -> None:
    most = MOST_CHUNKS.value
    found = lengths((most + 2) * CHUNK, [], triton_device)
    assert found[:4] == [most, most, most, most - 1]
    assert found[-1] == 1
