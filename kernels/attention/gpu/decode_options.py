"""Decides which sequences the decode kernels serve, and plans them with tuned options, or defaults by head size."""

from __future__ import annotations

import torch

from baton.kernels import tuned
from baton.kernels.attention_batch import AttentionBatch

from .decode_combine import MOST_SEQS
from .decode_plan import DecodePlan, shares_that_fill

MIN_ROWS = 16  # least rows of a matrix product
MOST_ROWS = 32  # most rows for the queries of one sequence; prefill kernels serve more

# unit_tokens: keys of one loop iteration; programs: concurrent programs of a multiprocessor; min_units: least units of
# a share; early_units: units of a share that are prefetched before the query is ready; apart: parts are combined by
# `decode_combine`, in steps with few enough sequences for it
DEFAULT = {
    "unit_tokens": 64,
    "programs": 2,
    "min_units": 2,
    "early_units": 2,
    "apart": 0,
    "num_warps": 4,
    "num_stages": 5,
}
DEFAULT_OF_WIDE_HEADS = {**DEFAULT, "unit_tokens": 32}  # above 128 dimensions: two programs fit a multiprocessor
# above 256 dimensions: one program fits a multiprocessor
DEFAULT_OF_WIDEST_HEADS = {**DEFAULT_OF_WIDE_HEADS, "programs": 1, "num_warps": 8, "num_stages": 3}


def plan_decode(
    batch: AttentionBatch, *, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int
) -> DecodePlan:
    """Return the plan for the first `batch.num_decodes` sequences, or for all if there are no decodes.

    In the latter case, each has a few queries. Reads shapes only, so a CUDA graph may capture it.
    """
    group, num_seqs = num_heads // num_kv_heads, batch.num_decodes or batch.num_seqs
    key = tuning_key(group=group, num_kv_heads=num_kv_heads, head_dim=head_dim, num_seqs=num_seqs)
    default = default_options(head_dim)
    options = tuned.config("attention", batch.seq_lens.device, key, default)
    return decode_plan(batch, options, num_heads=num_heads, num_kv_heads=num_kv_heads, value_dim=value_dim)


def has_few_queries(batch: AttentionBatch, group: int) -> bool:
    """Return whether all sequences are decodes with so few drafts that their queries fit into one matrix product.

    `group` is the number of query heads that read a KV head.
    """
    return batch.drafted and not batch.num_decodes and batch.max_query_len <= MOST_ROWS // group


def most_queries(batch: AttentionBatch) -> int:
    """Return the largest number of queries of a sequence that the decode kernels serve in this step."""
    return 1 if batch.num_decodes else batch.max_query_len


def default_options(head_dim: int) -> dict[str, int]:
    """Return the options for head sizes without tuned ones."""
    if head_dim <= 128:
        return DEFAULT
    return DEFAULT_OF_WIDE_HEADS if head_dim <= 256 else DEFAULT_OF_WIDEST_HEADS


def tuning_key(*, group: int, num_kv_heads: int, head_dim: int, num_seqs: int) -> dict[str, int | str]:
    return {
        "kernel": "decode",
        "head_dim": str(head_dim),
        "group": group,
        "num_kv_heads": num_kv_heads,
        "num_seqs": num_seqs,
    }


def decode_plan(
    batch: AttentionBatch, options: dict[str, int], *, num_heads: int, num_kv_heads: int, value_dim: int
) -> DecodePlan:
    """Return the plan with these options, which have the keys of `DEFAULT`."""
    device = batch.seq_lens.device
    num_shares = shares_that_fill(device, num_kv_heads, options["programs"])
    queries = most_queries(batch)
    return DecodePlan(
        seq_lens=batch.seq_lens[: batch.num_decodes or batch.num_seqs],
        num_kv_heads=num_kv_heads,
        num_shares=num_shares,
        unit_tokens=options["unit_tokens"],
        min_units=options["min_units"],
        early_units=options["early_units"],
        apart=bool(options["apart"]) and queries == 1 and batch.num_decodes <= MOST_SEQS,
        options={name: options[name] for name in ("num_warps", "num_stages")},
        sums=torch.empty((num_shares, 2, queries * num_heads, value_dim), dtype=torch.float32, device=device),
        tops=torch.empty((2, num_shares, 2, queries * num_heads), dtype=torch.float32, device=device),
        queries=queries,
    )
