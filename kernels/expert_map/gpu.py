"""The expert map look-up in Triton: one program per block of (token, expert) pairs, with atomic counts of loads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import ExpertMap

BLOCK = 128


def map_experts(expert_ids: Tensor, table: ExpertMap, places: range, counted: range) -> Tensor:
    """See `baton.kernels.expert_map.map_experts`. Rows of ids may have any stride."""
    num_tokens, top_k = expert_ids.shape
    out = torch.empty((num_tokens, top_k), dtype=torch.int32, device=expert_ids.device)
    if num_tokens:
        map_experts_kernel[(triton.cdiv(num_tokens * top_k, BLOCK),)](
            expert_ids,
            table.places,
            table.counts,
            table.loads,
            out,
            len(table.counts),
            num_tokens,
            expert_ids.stride(0),
            places.start,
            len(places),
            counted.start,
            counted.stop,
            TOP_K=top_k,
            REPLICAS=table.places.shape[1],
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


@triton.jit(
    do_not_specialize=["num_experts", "num_tokens", "ids_stride", "first", "num_places", "counted_from", "counted_to"]
)
def map_experts_kernel(
    expert_ids,  # [T, TOP_K] int32, rows ids_stride apart
    places,  # [E, REPLICAS] int32
    counts,  # [E] int32
    loads,  # [E] int64
    out,  # [T, TOP_K] int32
    num_experts,
    num_tokens,
    ids_stride,
    first,
    num_places,
    counted_from,
    counted_to,
    TOP_K: tl.constexpr,
    REPLICAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = pair // TOP_K
    here = token < num_tokens
    expert = tl.load(expert_ids + token.to(tl.int64) * ids_stride + pair % TOP_K, mask=here, other=-1)
    routed = here & (expert >= 0) & (expert < num_experts)
    replica = token % tl.load(counts + expert, mask=routed, other=1)
    place = tl.load(places + expert * REPLICAS + replica, mask=routed, other=-1) - first
    tl.store(out + pair, tl.where(routed & (place >= 0) & (place < num_places), place, -1), mask=here)
    is_counted = routed & (token >= counted_from) & (token < counted_to)
    tl.atomic_add(loads + expert, tl.full([BLOCK], 1, tl.int64), mask=is_counted, sem="relaxed")
