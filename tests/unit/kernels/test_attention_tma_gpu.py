"""Decode kernels for Hopper, which fetch pages by TMA in warps of their own, against the reference on a device."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels.attention import AttentionRule, reference
from baton.kernels.attention.gpu import paged_attention, prepare
from baton.kernels.attention.gpu.decode_plan import DecodePlan, prepared

from .attention_tma_cases import KERNELS, NARROW, WIDE, either_cache, queries_for, rule_for
from .decode_attention_inputs import LAYER, RAGGED, decodes, drafted, queries
from .kernel_checks import PagedSequences, assert_as_accurate, poisoned_behind, without_poison

pytest.importorskip("triton")
pytestmark = pytest.mark.exhaustive

LONG = [5000, 1, 16, 333, 64, 65, 2048, 700, 63]
PAIRS = ((32, 8), (16, 8), (32, 4), (32, 2), (15, 5))  # query heads, KV heads


def fetched(
    q: Tensor, sequences: PagedSequences, num_shares: int | None = None, layers: int = 1, **options: Any
) -> Tensor:
    """Return what the kernel writes to a poisoned output; `num_shares` sets the number of shares."""
    kernel = KERNELS[sequences.kv.dtype]
    plan = kernel.plan_tma_decode(sequences.batch, sequences.kv, q.shape[1])
    assert plan is not None
    if num_shares is not None:
        plan = dataclasses.replace(plan, num_shares=num_shares)
    sums = torch.full((plan.num_shares, *plan.sums.shape[1:]), float("nan"), device=q.device)
    tops = torch.full((2, *sums.shape[:-1]), float("nan"), device=q.device)
    plan = dataclasses.replace(plan, sums=sums, tops=tops)
    rule = rule_for(sequences, **options)
    for _ in range(layers):
        out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device)
        kernel.tma_decode(q, sequences.kv, LAYER, sequences.batch, plan, rule, out=out)
    return out


def check(q: Tensor, sequences: PagedSequences, num_shares: int | None = None, **options: Any) -> None:
    result = fetched(q, sequences, num_shares, **options)
    clean, rule = without_poison(sequences.kv), rule_for(sequences, **options)
    exact = reference.paged_attention(q.double(), clean.double(), LAYER, sequences.batch, rule)
    same = reference.paged_attention(q, clean, LAYER, sequences.batch, rule)
    assert_as_accurate(result, exact, same, slack=2.0)


def on_hopper(seq_lens: Sequence[int], **shape: Any) -> PagedSequences:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")
    return decodes(torch.device("cuda"), seq_lens, **{"dtype": WIDE, "head_dim": 128, **shape})


# ---- on the device --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@either_cache
@pytest.mark.parametrize("num_shares", [None, 1, 2, 5, 9, 40])
@pytest.mark.parametrize("lengths", [RAGGED, LONG], ids=["short", "long"])
def test_the_result_is_right_in_however_many_shares(
    cache: torch.dtype, lengths: list[int], num_shares: int | None
) -> None:
    sequences = on_hopper(lengths, num_kv_heads=8, dtype=cache)
    check(queries_for(sequences, 32), sequences, num_shares)


def drafted_on_hopper(**shape: Any) -> PagedSequences:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")
    options = {"query_lens": [4, 1, 3, 2, 4, 1, 4, 4, 3], "seq_lens": LONG, "num_kv_heads": 8, "head_dim": 128}
    return drafted(torch.device("cuda"), **{**options, "dtype": WIDE, **shape})


@pytest.mark.gpu
@either_cache
@pytest.mark.parametrize("num_shares", [None, 1, 2, 5, 9, 40])
def test_each_of_a_few_queries_sees_the_keys_up_to_its_own(cache: torch.dtype, num_shares: int | None) -> None:
    sequences = drafted_on_hopper(dtype=cache)
    check(queries_for(sequences, 32), sequences, num_shares)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cache", "head_dim", "num_heads", "num_kv_heads"),
    [
        *((cache, dim, *pair) for cache in KERNELS for dim in (64, 128) for pair in ((16, 8), (32, 4), (15, 5))),
        (WIDE, 256, 8, 2),
    ],
)
def test_a_few_queries_of_heads_of_any_number_and_size(
    cache: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int
) -> None:
    sequences = drafted_on_hopper(dtype=cache, head_dim=head_dim, num_kv_heads=num_kv_heads)
    check(queries_for(sequences, num_heads), sequences, 7)


@pytest.mark.gpu
@either_cache
@pytest.mark.parametrize("window", [1, 2, 3, 64, 100, 1000])
@pytest.mark.parametrize("num_shares", [1, 7])
def test_a_window_begins_elsewhere_for_each_query(cache: torch.dtype, window: int, num_shares: int) -> None:
    sequences = drafted_on_hopper(dtype=cache)
    sinks = torch.linspace(-3, 3, 32, device="cuda")
    check(queries_for(sequences, 32), sequences, num_shares, window=window, sinks=sinks, soft_cap=20.0)


@pytest.mark.gpu
@either_cache
@pytest.mark.parametrize("window", [1, 20, 64, 100])
def test_blocks_behind_the_window_may_hold_nan(cache: torch.dtype, window: int) -> None:
    for sequences in (on_hopper(LONG, dtype=cache), drafted_on_hopper(dtype=cache)):
        clean = dataclasses.replace(sequences, kv=without_poison(sequences.kv))
        q, poisoned = queries_for(sequences, 32), poisoned_behind(clean, window)
        assert torch.equal(fetched(q, poisoned, 7, window=window), fetched(q, clean, 7, window=window))


@pytest.mark.gpu
@either_cache
@pytest.mark.parametrize("num_shares", [None, 1, 9])
def test_padding_tokens_after_a_few_queries_of_each_sequence_become_zero(
    cache: torch.dtype, num_shares: int | None
) -> None:
    sequences = drafted_on_hopper(dtype=cache, padding=(3, 11))
    num_tokens = sum(sequences.query_lens)
    result = fetched(queries_for(sequences, 32), sequences, num_shares)
    assert not result[num_tokens:].any()
    assert not result.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cache", "head_dim"), [(cache, dim) for cache in KERNELS for dim in KERNELS[cache].FITTINGS.few_rows]
)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), PAIRS)
def test_heads_of_any_number_and_size(cache: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    sequences = on_hopper(LONG, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=cache)
    check(queries_for(sequences, num_heads), sequences)
    check(queries_for(sequences, num_heads), sequences, 7)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "scaled", [{}, {"k_scale": None}, {"v_scale": None}, {"k_scale": None, "v_scale": None}], ids=str
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_cache_of_8_bits_has_scales_or_not_and_queries_of_either_type(head_dim: int, scaled: dict[str, None]) -> None:
    sequences = on_hopper(LONG, head_dim=head_dim, dtype=NARROW)
    check(queries_for(sequences, 8), sequences, 7, **scaled)
    check(queries_for(sequences, 8).half(), sequences, 7, **scaled)


@pytest.mark.gpu
def test_large_queries_over_a_cache_of_8_bits_lose_nothing() -> None:
    """FP8 products, which accumulate with about 14 bits, would not be accurate enough."""
    sequences = on_hopper(LONG, num_kv_heads=8, dtype=NARROW)
    check(queries_for(sequences, 32).half() * 16, sequences, k_scale=None)


@pytest.mark.gpu
@either_cache
def test_thousands_of_tiny_weights_add_up(cache: torch.dtype) -> None:
    """Each key weighs 2^-26 of the first one, whose value is 0. Float16 would round such weights to 0."""
    sequences = on_hopper([30000], dtype=cache)
    kv = torch.zeros(sequences.kv.shape, device="cuda")
    kv[:, :, LAYER, 1] = 1.0
    first = sequences.batch.block_tables[0, 0].long()
    kv[first, :, LAYER, 0, 0, 0], kv[first, :, LAYER, 1, 0] = 16.0, 0.0
    q = torch.zeros(1, 8, 128, dtype=WIDE, device="cuda")
    q[:, :, 0] = 12.75
    unscaled = {"k_scale": None, "v_scale": None}
    check(q, dataclasses.replace(sequences, kv=kv.to(cache)), 1, **unscaled)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dtype", "uses_tma"), [(256, WIDE, False), (128, torch.float32, True)])
def test_steps_that_the_fp8_kernel_does_not_support_are_served(
    head_dim: int, dtype: torch.dtype, uses_tma: bool
) -> None:
    sequences = on_hopper(LONG, head_dim=head_dim, dtype=NARROW)
    q, rule = queries(sequences, 8, dtype), rule_for(sequences)
    batch = prepare(sequences.batch, sequences.kv, num_heads=8)
    plan = prepared(batch).decode
    assert isinstance(plan, DecodePlan)
    assert plan.uses_tma == uses_tma
    clean = without_poison(sequences.kv)
    exact = reference.paged_attention(q.double(), clean.double(), LAYER, batch, rule)
    same = reference.paged_attention(q, clean, LAYER, batch, rule)
    assert_as_accurate(paged_attention(q, sequences.kv, LAYER, batch, rule, out=None), exact, same, slack=4.0)


@pytest.mark.gpu
@either_cache
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_pages_of_any_size_that_a_unit_holds(cache: torch.dtype, block_size: int, head_dim: int) -> None:
    sequences = on_hopper(LONG, num_kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=cache)
    check(queries_for(sequences, 8), sequences, 5)


@pytest.mark.gpu
@either_cache
@pytest.mark.parametrize("window", [1, 16, 100, 1000, 4999])
@pytest.mark.parametrize("num_shares", [1, 7])
def test_a_window_hides_older_keys(cache: torch.dtype, window: int, num_shares: int) -> None:
    sequences = on_hopper(LONG, dtype=cache)
    check(queries_for(sequences, 8), sequences, num_shares, window=window)


@pytest.mark.gpu
@either_cache
@pytest.mark.parametrize("num_shares", [1, 7])
def test_scores_are_capped_and_sinks_take_weight_once(cache: torch.dtype, num_shares: int) -> None:
    sequences = on_hopper(LONG, head_dim=64, dtype=cache)
    sinks = torch.tensor([0.5, -3.0, 4.0, 100.0] * 2, device="cuda")
    check(queries_for(sequences, 8) * 20, sequences, num_shares, soft_cap=5.0)
    check(queries_for(sequences, 8), sequences, num_shares, sinks=sinks)
    check(queries_for(sequences, 8), sequences, num_shares, sinks=sinks, soft_cap=5.0, window=300)


@pytest.mark.gpu
@either_cache
@pytest.mark.parametrize("lengths", [[9000], [9000, 40]], ids=str)
def test_parts_of_few_sequences_are_added_by_a_kernel_of_their_own(cache: torch.dtype, lengths: list[int]) -> None:
    sequences = on_hopper(lengths, num_kv_heads=8, dtype=cache)
    plan = KERNELS[cache].plan_tma_decode(sequences.batch, sequences.kv, 32)
    assert plan is not None
    assert plan.apart
    check(queries_for(sequences, 32), sequences)
    check(queries_for(sequences, 32), sequences, 33, window=2000)


@pytest.mark.gpu
@either_cache
@pytest.mark.parametrize("num_shares", [1, 4, 30])
def test_padding_sequences_give_zeros_and_change_no_other(cache: torch.dtype, num_shares: int) -> None:
    sequences = on_hopper([40, 5, 100, 7], dtype=cache)
    seq_lens = torch.tensor([40, 0, 100, 0], dtype=torch.int32, device="cuda")
    padded = dataclasses.replace(sequences, batch=dataclasses.replace(sequences.batch, seq_lens=seq_lens))
    q = queries_for(sequences, 8)
    assert not fetched(q, padded, num_shares)[[1, 3]].any()
    check(q, padded, num_shares)


@pytest.mark.gpu
@either_cache
def test_sequences_may_use_any_row_of_the_block_tables_and_queries_may_be_a_view(cache: torch.dtype) -> None:
    sequences = on_hopper([40, 5, 100], dtype=cache)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32, device="cuda")
    tables = torch.full((6, sequences.batch.block_tables.shape[1]), -(2**31), dtype=torch.int32, device="cuda")
    tables[rows.long()] = sequences.batch.block_tables
    batch = dataclasses.replace(sequences.batch, block_tables=tables, table_rows=rows)
    fused = torch.randn(3, 8 * 128 + 2 * 2 * 128, device="cuda").bfloat16()
    q = fused[:, : 8 * 128].unflatten(1, (8, 128))
    check(q, dataclasses.replace(sequences, batch=batch), 4)


@pytest.mark.gpu
@either_cache
def test_every_layer_leaves_the_workspace_ready_for_the_next(cache: torch.dtype) -> None:
    sequences = on_hopper(LONG, dtype=cache)
    q = queries_for(sequences, 8)
    assert torch.equal(fetched(q, sequences, 7, layers=3), fetched(q, sequences, 7))


@pytest.mark.gpu
@either_cache
def test_nan_in_a_query_makes_its_result_nan_and_no_other(cache: torch.dtype) -> None:
    sequences = on_hopper([40, 5, 100], dtype=cache)
    q = queries_for(sequences, 8)
    q[2, 1, 5] = float("nan")
    spoiled = torch.zeros(3, 8, dtype=torch.bool)
    spoiled[2, 1] = True
    assert torch.equal(fetched(q, sequences, 4).isnan().any(-1).cpu(), spoiled)


@pytest.mark.gpu
@either_cache
def test_hundreds_of_sequences_of_any_length_have_the_same_bits_every_time(cache: torch.dtype) -> None:
    lengths = random.Random(1)
    sequences = on_hopper([lengths.randint(1, 3000) for _ in range(300)], num_kv_heads=8, dtype=cache)
    clean = dataclasses.replace(sequences, kv=without_poison(sequences.kv))
    q = queries_for(sequences, 32)
    check(q, sequences)
    first = fetched(q, clean)
    assert all(torch.equal(fetched(q, clean), first) for _ in range(20))


@pytest.mark.gpu
@either_cache
def test_the_newest_key_counts_though_it_is_written_right_before(cache: torch.dtype) -> None:
    """Kernels fetch pages before earlier kernels have ended, except the pages that those write."""
    from baton.kernels.rope_kv import rope_and_cache

    sequences = on_hopper([200 + 3 * i for i in range(64)], num_kv_heads=8, dtype=cache)
    kv, batch = without_poison(sequences.kv), sequences.batch
    q, k, v = (torch.randn(64, heads, 128, device="cuda").bfloat16() for heads in (32, 8, 8))
    cos_sin = torch.cat([torch.ones(1000, 64), torch.zeros(1000, 64)], 1).to("cuda")
    batch = prepare(batch, kv, num_heads=32)
    plan = prepared(batch).decode
    assert isinstance(plan, DecodePlan)
    assert plan.uses_tma
    for _ in range(20):
        turned = rope_and_cache(q.clone(), k, v, cos_sin, kv, LAYER, batch)
        result = paged_attention(turned, kv, LAYER, batch, AttentionRule(128**-0.5), out=None)
        torch.cuda.synchronize()
        exact = reference.paged_attention(turned.float(), kv.float(), LAYER, batch, AttentionRule(128**-0.5))
        torch.testing.assert_close(result.float(), exact, rtol=2e-2, atol=2e-3)
        k, v = -k, -v
