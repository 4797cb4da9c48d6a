"""Benchmark of the expert map: every id is read once, every place is written once, every load is counted."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.roofline import BenchCase, cycling

from . import ExpertMap, map_experts

EXPERTS, TOP_K, RANKS = 128, 8, 8
REDUNDANT = 16  # experts that have a replica
BATCHES = 8  # batches of expert ids that a case cycles through
TOKENS_ON_CPU, TOKENS_ON_GPU = (1, 256), (1, 64, 1024, 16384)


def cases(device: torch.device) -> Iterator[BenchCase]:
    table = ExpertMap.empty(EXPERTS, 2, device)
    table.write([[expert, EXPERTS + expert] if expert < REDUNDANT else [expert] for expert in range(EXPERTS)])
    places = range((EXPERTS + REDUNDANT) // RANKS)
    for tokens in TOKENS_ON_GPU if device.type == "cuda" else TOKENS_ON_CPU:
        ids = [torch.randint(EXPERTS, (tokens, TOP_K), dtype=torch.int32, device=device) for _ in range(BATCHES)]
        counted = range(tokens)
        yield BenchCase(
            op="expert_map",
            shape=f"{tokens} tokens, {TOP_K} of {EXPERTS} experts",
            dtype=torch.int32,
            device=device,
            run=cycling(
                lambda expert_ids, counted=counted: map_experts(expert_ids, table, places=places, counted=counted), ids
            ),
            num_bytes=2 * ids[0].nbytes + table.places.nbytes + table.counts.nbytes + 2 * table.loads.nbytes,
        )
