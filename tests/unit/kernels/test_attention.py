"""Paged attention against the reference in float64, with NaN in all memory that must not be read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch, AttentionRule, paged_attention, reference

from .attention_cases import LAYER, attend, queries
from .kernel_checks import (
    PagedSequences,
    assert_as_accurate,
    paged_sequences,
    poisoned_behind,
    untouched_memory,
    without_poison,
)

pytestmark = pytest.mark.exhaustive

RAGGED = ([1, 1, 1, 5, 70, 130], [600, 1, 17, 1300, 70, 250])  # decodes, a chunk after a long prefix, whole prompts


def check(q: Tensor, sequences: PagedSequences, window: int | None = None, **rule: Any) -> None:
    result, clean = attend(q, sequences, window, **rule), without_poison(sequences.kv)
    made = AttentionRule(q.shape[2] ** -0.5, window=window, **rule)
    exact = reference.paged_attention(q.double(), clean.double(), LAYER, sequences.batch, made)
    same = reference.paged_attention(q, clean, LAYER, sequences.batch, made)
    assert_as_accurate(result, exact, same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 2), (3, 1), (8, 1), (6, 6), (16, 8)])
def test_query_heads_share_key_value_heads_in_any_ratio(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, num_threads: int
) -> None:
    sequences = paged_sequences(*RAGGED, num_kv_heads=num_kv_heads, dtype=dtype)
    check(queries(sequences, num_heads, 64, dtype), sequences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_heads_have_any_multiple_of_16_dimensions(dtype: torch.dtype, head_dim: int) -> None:
    sequences = paged_sequences(*RAGGED, head_dim=head_dim, dtype=dtype)
    check(queries(sequences, 4, head_dim, dtype), sequences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_heads_of_512_dimensions_are_served(dtype: torch.dtype) -> None:
    sequences = paged_sequences(*RAGGED, head_dim=512, dtype=dtype)
    q = queries(sequences, 4, 512, dtype)
    exact = reference.paged_attention(
        q.double(), without_poison(sequences.kv).double(), LAYER, sequences.batch, AttentionRule(512**-0.5)
    )
    same = reference.paged_attention(q, without_poison(sequences.kv), LAYER, sequences.batch, AttentionRule(512**-0.5))
    # The kernel adds up the 512 products of a score one by one, the reference in blocks.
    assert_as_accurate(attend(q, sequences), exact, same, slack=8.0 if dtype == torch.float32 else 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (96, 32), (32, 96), (48, 16), (24, 20)])
def test_values_may_have_another_width_than_keys(dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    sequences = paged_sequences(*RAGGED, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    if head_dim == 24:  # served by the reference, which multiplies masked values by 0
        sequences = PagedSequences(without_poison(sequences.kv), sequences.batch, sequences.query_lens)
    sinks = torch.tensor([0.5, -3.0, 1.0, 2.0])
    check(queries(sequences, 4, head_dim, dtype), sequences)
    check(queries(sequences, 4, head_dim, dtype), sequences, window=100, sinks=sinks)


def test_a_cache_of_another_key_dimension_is_refused() -> None:
    sequences = paged_sequences([1], [5], head_dim=48)
    with pytest.raises(ValueError, match="no keys of 64 dimensions"):
        attend(torch.zeros(1, 4, 64), sequences)


@pytest.mark.parametrize("head_dim", [24, 20])
def test_other_head_dimensions_are_served_too(head_dim: int) -> None:
    sequences = paged_sequences([1, 20], [40, 20], head_dim=head_dim)
    clean = PagedSequences(without_poison(sequences.kv), sequences.batch, sequences.query_lens)
    check(queries(sequences, 4, head_dim, torch.float32), clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [1, 2, 16, 100, 513, 5000])
def test_a_window_hides_older_keys(dtype: torch.dtype, window: int, num_threads: int) -> None:
    sequences = paged_sequences(*RAGGED, dtype=dtype)
    check(queries(sequences, 4, 64, dtype), sequences, window)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [1, 40, 100, 520])
def test_blocks_behind_the_window_may_hold_nan(dtype: torch.dtype, window: int) -> None:
    sequences = paged_sequences(*RAGGED, dtype=dtype)
    clean = PagedSequences(without_poison(sequences.kv), sequences.batch, sequences.query_lens)
    q = queries(sequences, 4, 64, dtype)
    assert torch.equal(attend(q, poisoned_behind(clean, window), window), attend(q, clean, window))


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_blocks_hold_any_multiple_of_16_tokens(block_size: int) -> None:
    sequences = paged_sequences(*RAGGED, block_size=block_size)
    check(queries(sequences, 4, 64, torch.float32), sequences)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1025])
def test_one_query_sees_every_key_of_any_context_length(length: int, num_threads: int) -> None:
    sequences = paged_sequences([1], [length], num_kv_heads=1, dtype=torch.bfloat16)
    check(queries(sequences, 2, 64, torch.bfloat16), sequences)


def test_large_scores_neither_overflow_nor_lose_the_largest() -> None:
    sequences = paged_sequences([1, 30], [200, 30])
    check(queries(sequences, 4, 64, torch.float32) * 1000, sequences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_in_a_query_makes_its_result_nan_and_no_other(dtype: torch.dtype) -> None:
    sequences = paged_sequences([1, 30], [200, 30], dtype=dtype)
    q = queries(sequences, 4, 64, dtype)
    q[7, 2, 5] = float("nan")
    spoiled = torch.zeros(31, 4, dtype=torch.bool)
    spoiled[7, 2] = True
    assert torch.equal(attend(q, sequences).isnan().any(-1), spoiled)


def test_an_empty_batch_gives_an_empty_result() -> None:
    sequences = paged_sequences([], [])
    assert attend(torch.empty(0, 4, 64), sequences).shape == (0, 4, 64)


def test_queries_may_be_a_view_into_a_fused_projection() -> None:
    sequences = paged_sequences(*RAGGED, dtype=torch.bfloat16)
    fused = torch.randn(sequences.batch.num_tokens, 4 * 64 + 2 * 2 * 64).bfloat16()
    check(fused[:, : 4 * 64].unflatten(1, (4, 64)), sequences)


# ---- padded steps and shared block tables ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequences_may_use_any_row_of_the_block_tables(dtype: torch.dtype) -> None:
    sequences = paged_sequences(*RAGGED, dtype=dtype)
    rows = torch.tensor([7, 0, 2, 3, 6, 1], dtype=torch.int32)
    tables = torch.full((8, sequences.batch.block_tables.shape[1]), -(2**31), dtype=torch.int32)
    tables[rows.long()] = sequences.batch.block_tables
    batch = dataclasses.replace(sequences.batch, block_tables=tables, table_rows=rows)
    q = queries(sequences, 4, 64, dtype)
    assert torch.equal(attend(q, dataclasses.replace(sequences, batch=batch)), attend(q, sequences))
    check(q, dataclasses.replace(sequences, batch=batch))


@pytest.mark.parametrize("run", [paged_attention, reference.paged_attention])
def test_padding_gives_zeros_and_changes_no_other(run: Callable[..., Tensor]) -> None:
    sequences = paged_sequences(*RAGGED)
    clean, batch = without_poison(sequences.kv), sequences.batch
    q = queries(sequences, 4, 64, torch.float32)
    expected = run(q, clean, LAYER, batch, AttentionRule(0.125))
    padded = dataclasses.replace(
        batch,
        query_start=torch.cat([batch.query_start, batch.query_start[-1:] + 1]),
        seq_lens=torch.cat([batch.seq_lens, torch.zeros(1, dtype=torch.int32)]),
        block_tables=torch.cat([batch.block_tables, torch.full_like(batch.block_tables[:1], -(2**31))]),
        positions=torch.cat([batch.positions, torch.zeros(3, dtype=torch.int64)]),
        slots=torch.cat([batch.slots, torch.full((3,), -1)]),
    )
    out = torch.full((q.shape[0] + 3, 4, 64), float("nan"))
    run(torch.cat([q, q[:3]]), clean, LAYER, padded, AttentionRule(0.125), out=out)
    assert torch.equal(out[: q.shape[0]], expected)
    assert not out[q.shape[0] :].any()


# ---- soft caps, sinks, scaled caches --------------------------------------------------------------------------------


def plainly(q: Tensor, keys: Tensor, values: Tensor, soft_cap: float, sink: float) -> Tensor:
    """Return the attention of one query of one head."""
    scores = soft_cap * torch.tanh(keys @ q / soft_cap)
    weights = scores.exp() / (scores.exp().sum() + math.exp(sink))
    return weights @ values


def test_a_cap_and_a_sink_follow_the_formula() -> None:
    sequences = paged_sequences([1], [16], num_kv_heads=1)
    q = queries(sequences, 2, 64, torch.float32)
    keys, values = sequences.kv[sequences.batch.block_tables[0, 0], 0, LAYER].double()
    sinks = torch.tensor([1.5, -0.5])
    rule = AttentionRule(1.0, soft_cap=3.0, sinks=sinks)
    out = paged_attention(q, sequences.kv, LAYER, sequences.batch, rule)
    for head in range(2):
        expected = plainly(q[0, head].double(), keys, values, 3.0, sinks[head].item())
        torch.testing.assert_close(out[0, head].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", [{"soft_cap": 0.5}, {"soft_cap": 50.0}, {"soft_cap": 5.0, "window": 24}], ids=str)
@pytest.mark.parametrize("head_dim", [80, 256])
def test_scores_are_capped_before_the_mask(
    dtype: torch.dtype, rule: dict[str, Any], head_dim: int, num_threads: int
) -> None:
    sequences = paged_sequences(*RAGGED, head_dim=head_dim, dtype=dtype)
    check(queries(sequences, 4, head_dim, dtype) * 2, sequences, **rule)


def test_capped_scores_are_served_by_the_native_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = paged_sequences(*RAGGED)
    monkeypatch.setattr(reference, "paged_attention", lambda *args, **kwargs: pytest.fail("the reference was called"))
    attend(queries(sequences, 4, 64, torch.float32), sequences, soft_cap=5.0)


def test_a_sink_of_minus_infinity_and_a_very_large_cap_change_nothing() -> None:
    sequences = paged_sequences(*RAGGED)
    q, clean = queries(sequences, 4, 64, torch.float32), without_poison(sequences.kv)
    plain = reference.paged_attention(q, clean, LAYER, sequences.batch, AttentionRule(0.125))
    sinks = torch.full((4,), -float("inf"))
    result = paged_attention(q, clean, LAYER, sequences.batch, AttentionRule(0.125, sinks=sinks, soft_cap=1e6))
    torch.testing.assert_close(result, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 24])
def test_sinks_take_weight_once_however_keys_are_divided(
    dtype: torch.dtype, window: int | None, num_threads: int
) -> None:
    sequences = paged_sequences(*RAGGED, dtype=dtype)
    sinks = torch.tensor([1.5, -20.0, 6.0, -float("inf")])
    check(queries(sequences, 4, 64, dtype), sequences, window, sinks=sinks)


def test_a_sink_far_above_all_scores_makes_the_result_zero() -> None:
    sequences = paged_sequences(*RAGGED)
    out = attend(queries(sequences, 4, 64, torch.float32), sequences, sinks=torch.full((4,), 1e4))
    assert not out.any()


def test_keys_and_values_are_multiplied_by_their_scales() -> None:
    sequences = paged_sequences(*RAGGED)
    q, clean = queries(sequences, 4, 64, torch.float32), without_poison(sequences.kv)
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([4.0])}
    scaled = paged_attention(q, clean, LAYER, sequences.batch, AttentionRule(0.25, **scales))
    plain = paged_attention(q, clean, LAYER, sequences.batch, AttentionRule(0.125))
    torch.testing.assert_close(scaled, plain * 4, atol=1e-5, rtol=1e-5)


# ---- a token's result depends on its own sequence alone, to the last bit --------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 90])
def test_a_sequence_gives_the_same_bits_alone_as_in_a_batch(dtype: torch.dtype, window: int | None) -> None:
    sequences = paged_sequences(*RAGGED, dtype=dtype)
    q = queries(sequences, 4, 64, dtype)
    together = attend(q, sequences, window)
    starts = sequences.batch.query_start.tolist()
    for index, (query_len, seq_len) in enumerate(zip(*RAGGED, strict=True)):
        table = sequences.batch.block_tables[index : index + 1]
        alone = PagedSequences(sequences.kv, AttentionBatch.plan([query_len], [seq_len], table, 16), [query_len])
        tokens = slice(starts[index], starts[index + 1])
        assert torch.equal(attend(q[tokens], alone, window), together[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 90, 600])
@pytest.mark.parametrize("cuts", [[1], [64], [37, 513], list(range(1, 40))])
def test_a_prompt_gives_the_same_bits_however_it_is_cut(
    dtype: torch.dtype, window: int | None, cuts: list[int]
) -> None:
    length = 700
    whole = paged_sequences([length], [length], dtype=dtype)
    q = queries(whole, 4, 64, dtype)
    expected = attend(q, whole, window)
    for begin, end in zip([0, *cuts], [*cuts, length], strict=True):
        batch = AttentionBatch.plan([end - begin], [end], whole.batch.block_tables, 16)
        chunk = attend(q[begin:end], PagedSequences(whole.kv, batch, [end - begin]), window)
        assert torch.equal(chunk, expected[begin:end])


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 8, 11, 16, 17, 22, 33])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 32), (4, 2, 64), (3, 1, 128), (32, 2, 64), (4, 2, 80)]
)
def test_a_token_gives_the_same_bits_among_any_number_of_rows(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": torch.bfloat16}
    whole = paged_sequences([150], [150], **shape)
    q = queries(whole, num_heads, head_dim, torch.bfloat16) * 4
    expected = attend(q, whole)
    for end in range(num_tokens, 151):  # so many ends, since bfloat16 shows few differences in the last bits of a sum
        batch = AttentionBatch.plan([num_tokens], [end], whole.batch.block_tables, 16)
        rows = slice(end - num_tokens, end)
        chunk = attend(q[rows], PagedSequences(whole.kv, batch, [num_tokens]))
        assert torch.equal(chunk, expected[rows])


def test_the_number_of_threads_changes_no_bit() -> None:
    for lengths in (RAGGED, ([1], [5000])):  # the keys of a lone decode are divided over the threads
        sequences = paged_sequences(*lengths, dtype=torch.bfloat16)
        q = queries(sequences, 4, 64, torch.bfloat16)
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(attend(q, sequences))
        torch.set_num_threads(1)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_blocks_beyond_4_gib_of_elements_are_found() -> None:
    small = paged_sequences([3], [40], num_layers=LAYER + 1, dtype=torch.bfloat16)
    block_elements = small.kv[0].numel()
    far = (1 << 32) // block_elements + 1
    kv = untouched_memory((far + small.kv.shape[0], *small.kv.shape[1:]), torch.bfloat16)
    kv[far:] = small.kv
    batch = AttentionBatch.plan([3], [40], small.batch.block_tables + far, 16)
    q = queries(small, 4, 64, torch.bfloat16)
    assert torch.equal(attend(q, PagedSequences(kv, batch, [3])), attend(q, small))
