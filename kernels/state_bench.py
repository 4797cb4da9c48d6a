"""Sizes and states that the benches and the tuning of ops with a recurrent state share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .roofline import copies_beyond_caches
from .state_batch import StateBatch

DECODES = (1, 4, 16, 64, 256)  # sequences of one token
PREFILLS = ((1, 512), (1, 4096), (16, 1024), (16, 4096), (2, 32768))  # sequences, tokens of each
MOST_COPIES = 64  # most copies of a step's states


def bench_steps(device: torch.device) -> dict[str, list[int]]:
    """Return {name: tokens of each sequence}; a CPU gets short ones."""
    if device.type != "cuda":
        return {"decode 1": [1], "prefill 1 x 256": [256]}
    return {
        "decode 1": [1],
        "decode 64": [1] * 64,
        "decode 256": [1] * 256,
        "prefill 1 x 1k": [1024],
        "prefill 16 x 4k": [4096] * 16,
        "prefill 2 x 32k": [32768] * 2,
    }


def states_beyond_caches(
    lengths: Sequence[int], shape: Sequence[int], device: torch.device
) -> tuple[Tensor, list[StateBatch]]:
    """Return an arena of float32 states [slots, *shape], larger than the caches, and batches that share its slots."""
    num_seqs, num_bytes = len(lengths), 4 * torch.Size(shape).numel()
    copies = min(MOST_COPIES, copies_beyond_caches(num_bytes * num_seqs))
    state = torch.randn(copies * num_seqs, *shape, device=device)
    slots = torch.randperm(len(state)).view(copies, num_seqs).tolist()
    return state, [StateBatch.plan(lengths, own, own, device=device) for own in slots]
