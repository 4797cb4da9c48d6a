"""Prefill attention on the device against the reference in float64, with NaN in all memory that must not be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch, AttentionRule, reference
from baton.kernels.kv_rows import kv_rows

from .kernel_checks import assert_as_accurate, paged_sequences, poisoned_behind, without_poison
from .prefill_attention_inputs import LAYER, MIXED, on_device, queries

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def gpu(triton_device: torch.device) -> ModuleType:
    """The module under test, which needs Triton to be imported."""
    from baton.kernels.attention import gpu

    return gpu


def plan_of(batch: AttentionBatch, first_seq: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Any:
    from baton.kernels.query_tiles import plan_prefill

    return plan_prefill(batch, first_seq, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)


def attend(gpu: ModuleType, q: Tensor, kv: Tensor, batch: AttentionBatch, first_seq: int = 0, **options: Any) -> Tensor:
    value_dim = kv_rows(kv, q.shape[2]).value_dim
    out = torch.full((*q.shape[:2], value_dim), float("nan"), dtype=q.dtype, device=q.device)
    plan = plan_of(batch, first_seq, q.shape[1], kv.shape[1], q.shape[2])
    gpu.paged_prefill(q, kv, LAYER, batch, plan, AttentionRule(q.shape[2] ** -0.5, **options), out=out)
    return out


def check(
    gpu: ModuleType,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    device: torch.device,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    slack: float = 3.0,
    **options: Any,
) -> None:
    sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    sizes |= {} if value_dim is None else {"value_dim": value_dim}
    sequences = on_device(paged_sequences(query_lens, seq_lens, dtype=dtype, **sizes), device)
    q = queries(sequences.batch, num_heads, head_dim, dtype)
    result = attend(gpu, q, sequences.kv, sequences.batch, **options)
    clean, rule = without_poison(sequences.kv), AttentionRule(head_dim**-0.5, **options)
    exact = reference.paged_attention(q.double(), clean.double(), LAYER, sequences.batch, rule)
    same = reference.paged_attention(q, clean, LAYER, sequences.batch, rule)
    assert_as_accurate(result, exact, same.to(dtype), slack)


@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (8, 2), (7, 1), (6, 2)])
def test_query_heads_share_key_value_heads_in_any_ratio(
    gpu: ModuleType, triton_device: torch.device, num_heads: int, num_kv_heads: int
) -> None:
    check(gpu, *MIXED, triton_device, num_heads=num_heads, num_kv_heads=num_kv_heads)


def test_more_query_heads_than_a_tile_has_rows_take_several_tiles(gpu: ModuleType, triton_device: torch.device) -> None:
    check(gpu, [1, 2], [20, 3], triton_device, num_heads=144, num_kv_heads=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 256, 512])
def test_heads_have_any_number_of_dimensions(
    gpu: ModuleType, triton_device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    check(gpu, [3, 40], [70, 40], triton_device, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (48, 32), (32, 80)])
def test_values_may_have_another_width_than_keys(
    gpu: ModuleType, triton_device: torch.device, head_dim: int, value_dim: int
) -> None:
    sinks = torch.tensor([0.5, -20.0, 3.0, 1.0], device=triton_device)
    check(gpu, [3, 40], [70, 40], triton_device, head_dim=head_dim, value_dim=value_dim, sinks=sinks, window=30)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 20, 64, 100, 500])
def test_a_window_hides_older_keys(gpu: ModuleType, triton_device: torch.device, window: int) -> None:
    check(gpu, [1, 70, 200], [150, 200, 200], triton_device, window=window)


@pytest.mark.parametrize("window", [20, 64, 100])
def test_blocks_behind_the_window_may_hold_nan(gpu: ModuleType, triton_device: torch.device, window: int) -> None:
    sequences = on_device(paged_sequences([1, 70, 40], [150, 200, 40], head_dim=16), triton_device)
    clean = replace(sequences, kv=without_poison(sequences.kv))
    q, kv = queries(sequences.batch, 4, 16, torch.float32), poisoned_behind(clean, window).kv
    result = attend(gpu, q, kv, sequences.batch, window=window)
    assert torch.equal(result, attend(gpu, q, clean.kv, sequences.batch, window=window))


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_blocks_hold_any_number_of_tokens(gpu: ModuleType, triton_device: torch.device, block_size: int) -> None:
    check(gpu, [1, 33], [70, 50], triton_device, block_size=block_size)


@pytest.mark.slow
def test_scores_are_capped_before_the_mask(gpu: ModuleType, triton_device: torch.device) -> None:
    check(gpu, *MIXED, triton_device, soft_cap=0.5)
    check(gpu, *MIXED, triton_device, soft_cap=30.0, slack=30.0)  # the error of tanh is relative to the cap


def test_wide_heads_have_windows_and_caps_too(gpu: ModuleType, triton_device: torch.device) -> None:
    check(gpu, [3, 40], [70, 40], triton_device, head_dim=256, window=30, soft_cap=5.0, slack=5.0)


def test_sinks_take_weight_and_give_no_value(gpu: ModuleType, triton_device: torch.device) -> None:
    sinks = torch.tensor([0.5, -20.0, 3.0, 20.0], device=triton_device)
    check(gpu, *MIXED, triton_device, sinks=sinks)
    check(gpu, *MIXED, triton_device, sinks=sinks, window=30, soft_cap=20.0, slack=30.0)


def test_a_float8_cache_is_scaled_back(gpu: ModuleType, triton_device: torch.device) -> None:
    sequences = on_device(paged_sequences(*MIXED, head_dim=16, dtype=torch.float32), triton_device)
    stored = (without_poison(sequences.kv) / 0.25).to(torch.float8_e4m3fn)
    scales = {"k_scale": torch.tensor(0.25, device=triton_device), "v_scale": torch.tensor([0.5], device=triton_device)}
    q = queries(sequences.batch, 4, 16, torch.float32)
    result = attend(gpu, q, stored, sequences.batch, **scales)
    rule = AttentionRule(0.25, **scales)
    expected = reference.paged_attention(q.double(), stored.double(), LAYER, sequences.batch, rule)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_hopper_kernel_serves_scales_of_8_bit_caches_only(triton_device: torch.device) -> None:
    from baton.kernels.attention.gpu import prefill_hopper

    sequences = on_device(paged_sequences([200], [200], head_dim=64, dtype=torch.float16), triton_device)
    q, plan = queries(sequences.batch, 4, 64, torch.float16), plan_of(sequences.batch, 0, 4, 2, 64)
    one = torch.ones(1, device=triton_device)
    rules = [AttentionRule(0.125), AttentionRule(0.125, k_scale=one), AttentionRule(0.125, v_scale=one)]
    assert [prefill_hopper.fits(q, sequences.kv, plan, rule) for rule in rules] == [True, False, False]
    in_8_bits = sequences.kv.to(torch.float8_e4m3fn)
    assert [prefill_hopper.fits(q, in_8_bits, plan, rule) for rule in rules] == [True, True, True]
    assert not prefill_hopper.fits(q.float(), in_8_bits, plan, rules[0])


def test_queries_may_be_a_view_into_a_fused_projection(gpu: ModuleType, triton_device: torch.device) -> None:
    sequences = on_device(paged_sequences(*MIXED, head_dim=16), triton_device)
    fused = torch.randn(sequences.batch.num_tokens, 4 * 16 + 64, device=triton_device)
    q = fused[:, :64].unflatten(1, (4, 16))
    result = attend(gpu, q, sequences.kv, sequences.batch)
    assert torch.equal(result, attend(gpu, q.contiguous(), sequences.kv, sequences.batch))


def test_decodes_before_the_first_sequence_are_left_alone(gpu: ModuleType, triton_device: torch.device) -> None:
    sequences = on_device(paged_sequences(*MIXED, head_dim=16), triton_device)
    q = queries(sequences.batch, 4, 16, torch.float32)
    every, some = (attend(gpu, q, sequences.kv, sequences.batch, first_seq=first) for first in (0, 2))
    assert some[:2].isnan().all()
    torch.testing.assert_close(some[2:], every[2:])


def test_sequences_find_their_blocks_through_table_rows(gpu: ModuleType, triton_device: torch.device) -> None:
    sequences = on_device(paged_sequences(*MIXED, head_dim=16), triton_device)
    q, batch = queries(sequences.batch, 4, 16, torch.float32), sequences.batch
    rows = torch.tensor([3, 0, 6, 1, 4], dtype=torch.int32, device=triton_device)
    tables = torch.full((7, batch.block_tables.shape[1]), -1, dtype=torch.int32, device=triton_device)
    tables[rows.long()] = batch.block_tables
    elsewhere = replace(batch, block_tables=tables, table_rows=rows)
    assert torch.equal(attend(gpu, q, sequences.kv, elsewhere), attend(gpu, q, sequences.kv, batch))


def test_padding_becomes_zero_and_changes_nothing(gpu: ModuleType, triton_device: torch.device) -> None:
    sequences = on_device(paged_sequences(*MIXED, head_dim=16), triton_device)
    batch, tokens = sequences.batch, sequences.batch.num_tokens
    padded = replace(
        batch,
        query_start=torch.nn.functional.pad(batch.query_start, (0, 3), value=tokens),
        seq_lens=torch.nn.functional.pad(batch.seq_lens, (0, 3)),
        positions=torch.nn.functional.pad(batch.positions, (0, 75)),
        slots=torch.nn.functional.pad(batch.slots, (0, 75), value=-1),
        table_rows=torch.tensor([0, 1, 2, 3, 4, 0, 0, 0], dtype=torch.int32, device=triton_device),
    )
    q = queries(padded, 4, 16, torch.float32)
    result = attend(gpu, q, sequences.kv, padded)
    assert torch.equal(result[:tokens], attend(gpu, q[:tokens], sequences.kv, batch))
    assert torch.equal(result[tokens:], torch.zeros_like(result[tokens:]))


def test_nan_in_a_query_makes_its_row_nan_and_no_other(gpu: ModuleType, triton_device: torch.device) -> None:
    sequences = on_device(paged_sequences([30], [60], head_dim=16), triton_device)
    q = queries(sequences.batch, 4, 16, torch.float32)
    q[7, 2, 5] = float("nan")
    spoiled = torch.zeros(30, 4, dtype=torch.bool, device=triton_device)
    spoiled[7, 2] = True
    assert torch.equal(attend(gpu, q, sequences.kv, sequences.batch).isnan().any(-1), spoiled)


# ---- the plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_seq", [0, 2])
def test_every_token_is_in_one_tile_and_tiles_with_the_most_keys_come_first(
    triton_device: torch.device, first_seq: int
) -> None:
    batch = on_device(paged_sequences(*MIXED, head_dim=16), triton_device).batch
    plan = plan_of(batch, first_seq, 8, 2, 16)
    tiles = plan.items[: plan.num_tiles.item()].tolist()
    covered = sorted(token + offset for token, count, _, _ in tiles for offset in range(count))
    assert covered == list(range(first_seq, batch.num_tokens))
    starts = batch.query_start.tolist()
    for token, count, position, row in tiles:
        assert starts[row] <= token < token + count <= starts[row + 1]
        assert count <= plan.tile_tokens
        assert position == batch.positions[token].item()
    num_keys = [position + count for _, count, position, _ in tiles]
    assert num_keys == sorted(num_keys, reverse=True)
    assert plan.queue.tolist() == [0, 0]


def test_a_plan_depends_on_shapes_only(triton_device: torch.device) -> None:
    short, long = (on_device(paged_sequences([60, n], [60, n], head_dim=16), triton_device).batch for n in (1, 60))
    short = replace(short, positions=long.positions, slots=long.slots, max_query_len=long.max_query_len)
    assert plan_of(short, 0, 8, 2, 16).items.shape == plan_of(long, 0, 8, 2, 16).items.shape


@pytest.mark.parametrize(
    ("group", "long", "short"), [(1, 1, 1), (4, 4, 4), (6, 2, 6), (7, 1, 7), (48, 16, 48), (128, 64, 64), (144, 16, 48)]
)
def test_as_many_heads_share_a_tile_as_divide_it(
    triton_device: torch.device, group: int, long: int, short: int
) -> None:
    from baton.kernels.query_tiles import LONG_ROWS, SHORT_ROWS, heads_per_tile

    assert heads_per_tile(group, LONG_ROWS) == long
    assert heads_per_tile(group, SHORT_ROWS) == short


# ---- on a GPU -------------------------------------------------------------------------------------------------------

LARGE = ([1, 1, 5, 40, 300, 1000], [700, 1, 90, 40, 1300, 1000])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"soft_cap": 20.0}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (32, 8), (28, 4), (16, 1)])
def test_long_and_short_tiles_in_bfloat16_equal_the_reference(
    gpu: ModuleType, triton_device: torch.device, num_heads: int, num_kv_heads: int, head_dim: int, options: Any
) -> None:
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    check(gpu, *LARGE, triton_device, dtype=torch.bfloat16, **heads, **options)  # long tiles; Hopper has its own kernel
    check(gpu, [9, 3], [70, 900], triton_device, dtype=torch.bfloat16, **heads, **options)  # short tiles


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"scaled": True, "window": 100}, {"scaled": True, "soft_cap": 20.0}], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [
        (64, 16, torch.bfloat16),
        (128, 16, torch.bfloat16),
        (128, 64, torch.bfloat16),
        (128, 8, torch.float16),
        (256, 16, torch.bfloat16),
    ],
    ids=str,
)
def test_long_tiles_over_8_bit_caches_equal_the_reference(
    gpu: ModuleType,
    triton_device: torch.device,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> None:
    sequences = on_device(paged_sequences(*LARGE, head_dim=head_dim, block_size=block_size), triton_device)
    stored = sequences.kv.to(torch.float8_e4m3fn)  # NaN stays NaN
    options = dict(options)
    if options.pop("scaled", False):
        options["k_scale"], options["v_scale"] = torch.tensor([[0.25], [1.7]], device=triton_device)
    q = queries(sequences.batch, 8, head_dim, dtype)
    result = attend(gpu, q, stored, sequences.batch, **options)
    clean, rule = without_poison(stored), AttentionRule(head_dim**-0.5, **options)
    exact = reference.paged_attention(q.double(), clean.double(), LAYER, sequences.batch, rule)
    same = reference.paged_attention(q, clean.to(dtype), LAYER, sequences.batch, rule)
    assert_as_accurate(result, exact, same.to(dtype), 3.0)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("window", [20, 100, 128])
def test_blocks_behind_the_window_of_long_tiles_may_hold_nan(
    gpu: ModuleType, triton_device: torch.device, cache: torch.dtype, window: int
) -> None:
    sequences = on_device(paged_sequences(*LARGE, head_dim=128), triton_device)
    clean = replace(sequences, kv=without_poison(sequences.kv).to(cache))
    q, kv = queries(sequences.batch, 8, 128, torch.bfloat16), poisoned_behind(clean, window).kv
    result = attend(gpu, q, kv, sequences.batch, window=window)
    assert torch.equal(result, attend(gpu, q, clean.kv, sequences.batch, window=window))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_caches_of_the_same_values_in_8_and_16_bits_give_the_same_result(
    gpu: ModuleType, triton_device: torch.device, head_dim: int
) -> None:
    sequences = on_device(paged_sequences([700, 1000], [5000, 1000], head_dim=head_dim), triton_device)
    stored = sequences.kv.to(torch.float8_e4m3fn)
    q = queries(sequences.batch, 8, head_dim, torch.bfloat16)
    in_8_bits, in_16_bits = (attend(gpu, q, kv, sequences.batch) for kv in (stored, stored.to(torch.bfloat16)))
    torch.testing.assert_close(in_8_bits, in_16_bits)


@pytest.mark.gpu
def test_blocks_beyond_4_gib_are_found(gpu: ModuleType, triton_device: torch.device) -> None:
    sequences = paged_sequences([200], [300], head_dim=128, num_kv_heads=8, dtype=torch.bfloat16)
    q = queries(on_device(sequences, triton_device).batch, 32, 128, torch.bfloat16)
    near = on_device(sequences, triton_device)
    block_bytes = near.kv[0].nbytes
    first = (5 << 30) // block_bytes
    far_kv = torch.empty(first + len(near.kv), *near.kv.shape[1:], dtype=torch.bfloat16, device=triton_device)
    far_kv[first:] = near.kv
    far = replace(near.batch, block_tables=near.batch.block_tables + first)
    assert torch.equal(attend(gpu, q, far_kv, far), attend(gpu, q, near.kv, near.batch))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_captured_graph_serves_other_lengths(
    gpu: ModuleType, triton_device: torch.device, cache: torch.dtype
) -> None:
    first = on_device(paged_sequences([50, 200], [300, 700], head_dim=128), triton_device)
    kv = first.kv.to(cache)
    q = queries(first.batch, 4, 128, torch.bfloat16)
    attend(gpu, q, kv, first.batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(gpu, q, kv, first.batch)
    for query_lens in ([249, 1], [100, 150]):
        starts = torch.tensor([0, query_lens[0], 250], dtype=torch.int32)
        first.batch.query_start.copy_(starts)
        graph.replay()
        assert torch.equal(captured, attend(gpu, q, kv, first.batch))


@pytest.mark.gpu
def test_keys_and_values_may_be_packed_one_sequence_after_another(triton_device: torch.device) -> None:
    from baton.kernels.mla.gpu import dense_hopper

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    query_lens, seq_lens, num_heads = [1, 300, 70], [200, 900, 70], 3
    batch = on_device(paged_sequences(query_lens, seq_lens), triton_device).batch
    plan = plan_of(batch, 0, num_heads, num_heads, 192)
    key_start = torch.tensor([0, 200, 1100, 1170], dtype=torch.int32, device=triton_device)
    q = queries(batch, num_heads, 192, torch.bfloat16)
    keys_values = torch.randn(1170, num_heads, 256, device=triton_device).bfloat16()
    k_rope = torch.randn(1170, 576, device=triton_device).bfloat16()[:, 512:]
    out = torch.full((batch.num_tokens, num_heads, 128), float("nan"), dtype=torch.bfloat16, device=triton_device)
    assert dense_hopper.fits(q, keys_values, k_rope, plan)
    dense_hopper.dense_prefill(q, keys_values, k_rope, key_start, plan, scale=0.1, out=out)
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        token, key = batch.query_start[index].item(), key_start[index].item()
        mine = keys_values[key : key + seq_len].double()
        k = torch.cat([mine[..., :128], k_rope[key : key + seq_len, None].double().expand(-1, num_heads, -1)], -1)
        scores = torch.einsum("qhd,khd->hqk", q[token : token + query_len].double(), k) * 0.1
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(seq_len - query_len + 1)
        exact = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), mine[..., 128:])
        assert_as_accurate(out[token : token + query_len], exact, exact.bfloat16(), slack=4.0)
