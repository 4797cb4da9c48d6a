"""Steps that the kernels for decodes serve, and their plans: with tuned options, else with defaults by head size."""

from __future__ import annotations

import torch

from baton.kernels import tuned
from baton.kernels.attention_batch import AttentionBatch

from .decode_combine import MOST_SEQS
from .decode_plan import DecodePlan, shares_that_fill

MIN_ROWS = 16  # of a matrix product
MOST_ROWS = 32  # of queries of one sequence: more belong into tiles of their own

# unit_tokens: keys of one step of the loop; programs: on a multiprocessor at a time; min_units: of a share;
# early_units: of a share, prefetched before the query is there; apart: parts are added by `decode_combine`, up to the
# number of sequences that it serves
DEFAULT = {
    "unit_tokens": 64,
    "programs": 2,
    "min_units": 2,
    "early_units": 2,
    "apart": 0,
    "num_warps": 4,
    "num_stages": 5,
}
DEFAULT_OF_WIDE_HEADS = {**DEFAULT, "unit_tokens": 32}  # of more than 128 dimensions: what two programs can hold
# of more than 256 dimensions: what one program can hold
DEFAULT_OF_WIDEST_HEADS = {**DEFAULT_OF_WIDE_HEADS, "programs": 1, "num_warps": 8, "num_stages": 3}


def plan_decode(
    batch: AttentionBatch, *, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int
) -> DecodePlan:
    """Return the plan for the first `batch.num_decodes` sequences; where there are none, for all, with a few queries
    each. Looks at shapes only: safe inside a captured graph.
    """
    group, num_seqs = num_heads // num_kv_heads, batch.num_decodes or batch.num_seqs
    key = tuning_key(group=group, num_kv_heads=num_kv_heads, head_dim=head_dim, num_seqs=num_seqs)
    default = default_options(head_dim)
    options = tuned.config("attention", batch.seq_lens.device, key, default)
    return decode_plan(batch, options, num_heads=num_heads, num_kv_heads=num_kv_heads, value_dim=value_dim)


def has_few_queries(batch: AttentionBatch, group: int) -> bool:
    """Return true if the sequences of a step are decodes with so few drafts that their queries, of `group` heads for
    each KV head, fit the rows of a product.
    """
    return batch.drafted and not batch.num_decodes and batch.max_query_len <= MOST_ROWS // group


def most_queries(batch: AttentionBatch) -> int:
    """Return the most queries that a sequence has, of those that the kernels for decodes serve in a step."""
    return 1 if batch.num_decodes else batch.max_query_len


def default_options(head_dim: int) -> dict[str, int]:
    """Return the options of heads that are not in the tables."""
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
    """Return the plan for given options, which have the keys of `DEFAULT`."""
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
