"""The decode kernel against the reference, with NaN in memory that must not be read; interpreted without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels.attention import AttentionRule, reference
from baton.kernels.attention.gpu import decode_combine, decode_options, paged_attention, prepare
from baton.kernels.attention.gpu.decode_plan import plan_shares, prepared
from baton.kernels.attention.rule import UNLIMITED
from baton.kernels.kv_rows import kv_rows

from .decode_attention_inputs import LAYER, decodes, drafted, on_device, queries
from .kernel_checks import PagedSequences, assert_as_accurate, paged_sequences, without_poison

pytest.importorskip("triton")
pytestmark = pytest.mark.exhaustive

SMALL_UNITS = {"unit_tokens": 16, "programs": 2, "min_units": 1, "early_units": 1, "apart": 0} | {
    "num_warps": 4,
    "num_stages": 2,
}


@pytest.fixture(params=[0, 1], ids=["together", "apart"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that finishes last adds up the parts, or a separate kernel does."""
    monkeypatch.setitem(SMALL_UNITS, "apart", request.param)
    monkeypatch.setattr(decode_combine, "PARTS_AT_ONCE", 4)


def attend(
    q: Tensor, sequences: PagedSequences, num_shares: int | None = None, layers: int = 1, **options: Any
) -> Tensor:
    """Return what the kernel writes to a poisoned output; `num_shares` sets the number of shares, of a unit or more."""
    num_kv_heads, dim = sequences.kv.shape[1], q.shape[2]
    value_dim = kv_rows(sequences.kv, dim).value_dim
    batch = prepare(sequences.batch, sequences.kv, num_heads=q.shape[1], head_dim=dim)
    if num_shares is not None:
        heads = {"num_heads": q.shape[1], "num_kv_heads": num_kv_heads, "value_dim": value_dim}
        plan = decode_options.decode_plan(batch, SMALL_UNITS, **heads)
        poison = torch.full((num_shares, *plan.sums.shape[1:]), float("nan"), device=q.device)
        tops = torch.full((2, *poison.shape[:-1]), float("nan"), device=q.device)
        plan = dataclasses.replace(plan, num_shares=num_shares, sums=poison, tops=tops)
        batch = dataclasses.replace(batch, prepared=dataclasses.replace(batch.prepared, decode=plan))
    rule = AttentionRule(dim**-0.5, **options)
    for _ in range(layers):
        out = torch.full((*q.shape[:2], value_dim), float("nan"), dtype=q.dtype, device=q.device)
        assert paged_attention(q, sequences.kv, LAYER, batch, rule, out=out) is out
    return out


def check(
    q: Tensor, sequences: PagedSequences, num_shares: int | None = None, *, slack: float = 4.0, **options: Any
) -> None:
    """Compare with the reference. `slack` applies to float32."""
    result = attend(q, sequences, num_shares, **options)
    clean, rule = without_poison(sequences.kv), AttentionRule(q.shape[2] ** -0.5, **options)
    exact = reference.paged_attention(q.double(), clean.double(), LAYER, sequences.batch, rule)
    same = reference.paged_attention(q, clean, LAYER, sequences.batch, rule)
    assert_as_accurate(result, exact, same, slack=slack if q.dtype == torch.float32 else 2.0)


@pytest.mark.slow
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("num_shares", [1, 2, 5, 9, 40])
def test_the_result_is_right_in_however_many_shares(triton_device: torch.device, num_shares: int) -> None:
    sequences = decodes(triton_device)
    check(queries(sequences, 4), sequences, num_shares)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 2), (3, 1), (8, 1), (20, 1)])
def test_query_heads_share_key_value_heads_in_any_ratio(
    triton_device: torch.device, num_heads: int, num_kv_heads: int
) -> None:
    sequences = decodes(triton_device, [70, 5], num_kv_heads=num_kv_heads)
    check(queries(sequences, num_heads), sequences, 3)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("head_dim", [16, 80, 128, 256, 512])
def test_heads_have_any_multiple_of_16_dimensions(triton_device: torch.device, head_dim: int) -> None:
    sequences = decodes(triton_device, [70, 5], head_dim=head_dim)
    check(queries(sequences, 4), sequences, 3)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (48, 32), (32, 80)])
def test_values_may_have_another_width_than_keys(triton_device: torch.device, head_dim: int, value_dim: int) -> None:
    sequences = decodes(triton_device, [70, 5], head_dim=head_dim, value_dim=value_dim)
    sinks = torch.tensor([0.5, -3.0, 4.0, 1.0], device=triton_device)
    check(queries(sequences, 4, head_dim=head_dim), sequences, 3, sinks=sinks, window=50)


@pytest.mark.slow
@pytest.mark.parametrize("num_shares", [None, 1, 2, 5, 9, 40])
def test_each_of_a_few_queries_sees_the_keys_up_to_its_own(triton_device: torch.device, num_shares: int | None) -> None:
    sequences = drafted(triton_device)
    check(queries(sequences, 4), sequences, num_shares)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2, 3, 16, 20, 100])
@pytest.mark.parametrize("num_shares", [1, 7])
def test_a_window_begins_elsewhere_for_each_query(triton_device: torch.device, window: int, num_shares: int) -> None:
    sequences = drafted(triton_device)
    check(queries(sequences, 4), sequences, num_shares, window=window)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 1), (8, 1), (10, 2)])
@pytest.mark.parametrize("num_shares", [2, 9])
def test_rules_hold_for_each_query_with_any_heads(
    triton_device: torch.device, num_heads: int, num_kv_heads: int, num_shares: int
) -> None:
    sequences = drafted(triton_device, num_kv_heads=num_kv_heads)
    sinks = torch.linspace(-3, 3, num_heads, device=triton_device)
    # the error of tanh is relative to the cap
    check(queries(sequences, num_heads), sequences, num_shares, sinks=sinks, soft_cap=20.0, slack=20.0)


@pytest.mark.slow
def test_a_few_queries_may_have_values_of_another_width(triton_device: torch.device) -> None:
    sequences = drafted(triton_device, head_dim=48, value_dim=32)
    check(queries(sequences, 4, head_dim=48), sequences, 5)


@pytest.mark.slow
@pytest.mark.parametrize("num_shares", [None, 1, 2, 9])
def test_padding_tokens_after_a_few_queries_of_each_sequence_become_zero(
    triton_device: torch.device, num_shares: int | None
) -> None:
    sequences = drafted(triton_device, padding=(2, 9))
    q, num_tokens = queries(sequences, 4), sum(sequences.query_lens)
    result = attend(q, sequences, num_shares)
    assert not result[num_tokens:].any()
    alone = drafted(triton_device)
    torch.testing.assert_close(result[:num_tokens], attend(q[:num_tokens], alone, num_shares), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("most", "num_heads", "is_drafted"), [(5, 14, True), (33, 2, True), (4, 4, False)])
def test_prompts_and_more_queries_than_a_product_has_rows_for_use_the_prefill_kernels(
    triton_device: torch.device, most: int, num_heads: int, is_drafted: bool
) -> None:
    """Decode kernels read older keys while earlier kernels still run; a prompt's older keys may be from this step."""
    sequences = drafted(triton_device, most=most)
    batch = dataclasses.replace(sequences.batch, drafted=is_drafted)
    plans = prepared(prepare(batch, sequences.kv, num_heads=num_heads))
    assert plans.decode is None
    assert plans.prefill is not None


@pytest.mark.parametrize("block_size", [16, 32])
def test_blocks_may_be_larger_than_a_unit(triton_device: torch.device, block_size: int) -> None:
    sequences = decodes(triton_device, [70, 5], block_size=block_size)
    check(queries(sequences, 4), sequences, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("window", [1, 16, 50, 1000])
@pytest.mark.parametrize("num_shares", [1, 7])
def test_a_window_hides_older_keys(triton_device: torch.device, window: int, num_shares: int) -> None:
    sequences = decodes(triton_device)
    check(queries(sequences, 4), sequences, num_shares, window=window)


@pytest.mark.slow
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("num_shares", [1, 7])
def test_scores_are_capped_and_sinks_take_weight_once(triton_device: torch.device, num_shares: int) -> None:
    sequences = decodes(triton_device)
    sinks = torch.tensor([0.5, -3.0, 4.0, 100.0], device=triton_device)
    check(queries(sequences, 4) * 20, sequences, num_shares, soft_cap=5.0)
    check(queries(sequences, 4), sequences, num_shares, sinks=sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_wide_heads_have_windows_and_caps_too(triton_device: torch.device, dtype: torch.dtype) -> None:
    sequences = decodes(triton_device, [150, 20], head_dim=256, num_kv_heads=1, dtype=dtype)
    check(queries(sequences, 2), sequences, soft_cap=5.0, window=70)


@pytest.mark.usefixtures("either_way")
def test_keys_and_values_have_scales(triton_device: torch.device) -> None:
    sequences = decodes(triton_device, [70, 5])
    scales = {"k_scale": torch.tensor(0.25, device=triton_device), "v_scale": torch.tensor([3.0], device=triton_device)}
    check(queries(sequences, 4), sequences, 3, **scales)


def test_half_precision_sums_in_float32(triton_device: torch.device) -> None:
    sequences = decodes(triton_device, dtype=torch.float16)
    check(queries(sequences, 4), sequences, 5)


def test_queries_may_be_a_view_into_a_fused_projection(triton_device: torch.device) -> None:
    sequences = decodes(triton_device, [70, 5])
    fused = torch.randn(2, 4 * 64 + 2 * 2 * 64, device=triton_device)
    check(fused[:, : 4 * 64].unflatten(1, (4, 64)), sequences)


def test_sequences_may_use_any_row_of_the_block_tables(triton_device: torch.device) -> None:
    sequences = decodes(triton_device, [40, 5, 100])
    rows = torch.tensor([4, 0, 2], dtype=torch.int32, device=triton_device)
    tables = torch.full((6, sequences.batch.block_tables.shape[1]), -(2**31), dtype=torch.int32, device=triton_device)
    tables[rows.long()] = sequences.batch.block_tables
    batch = dataclasses.replace(sequences.batch, block_tables=tables, table_rows=rows)
    check(queries(sequences, 4), dataclasses.replace(sequences, batch=batch), 4)


@pytest.mark.slow
@pytest.mark.parametrize("num_shares", [1, 4, 30])
def test_padding_sequences_give_zeros_and_change_no_other(triton_device: torch.device, num_shares: int) -> None:
    sequences = decodes(triton_device, [40, 5, 100])
    seq_lens = torch.tensor([40, 0, 100], dtype=torch.int32, device=triton_device)
    padded = dataclasses.replace(sequences, batch=dataclasses.replace(sequences.batch, seq_lens=seq_lens))
    q = queries(sequences, 4)
    assert not attend(q, padded, num_shares)[1].any()
    check(q, padded, num_shares)


def test_decodes_and_chunks_of_one_step_use_different_kernels(triton_device: torch.device) -> None:
    sequences = paged_sequences([1, 1, 1, 9, 20], [40, 5, 100, 30, 20])
    batch = on_device(sequences.batch, triton_device)
    sequences = PagedSequences(sequences.kv.to(triton_device), batch, sequences.query_lens)
    check(queries(sequences, 4), sequences)
    check(queries(sequences, 4), sequences, 3, window=10)


@pytest.mark.slow
def test_every_layer_leaves_the_workspace_ready_for_the_next(triton_device: torch.device) -> None:
    sequences = decodes(triton_device)
    q = queries(sequences, 4)
    assert torch.equal(attend(q, sequences, 7, layers=3), attend(q, sequences, 7))


def test_nan_in_a_query_makes_its_result_nan_and_no_other(triton_device: torch.device) -> None:
    sequences = decodes(triton_device, [40, 5, 100])
    q = queries(sequences, 4)
    q[2, 1, 5] = float("nan")
    spoiled = torch.zeros(3, 4, dtype=torch.bool)
    spoiled[2, 1] = True
    assert torch.equal(attend(q, sequences, 4).isnan().any(-1).cpu(), spoiled)


def test_a_batch_that_was_not_prepared_is_refused(triton_device: torch.device) -> None:
    sequences = decodes(triton_device, [5])
    with pytest.raises(ValueError, match="give it to kernels"):
        paged_attention(queries(sequences, 4), sequences.kv, LAYER, sequences.batch, AttentionRule(1.0), out=None)


# ---- the plan -------------------------------------------------------------------------------------------------------


def units(seq_len: int, window: int, unit: int) -> int:
    return max(1, -(-seq_len // unit) - max(0, seq_len - window) // unit)


@pytest.mark.parametrize("window", [UNLIMITED, 100, 1])
@pytest.mark.parametrize(("num_shares", "min_units"), [(1, 1), (7, 1), (7, 3), (64, 2)])
def test_shares_are_equal_and_cover_every_unit_once(
    triton_device: torch.device, window: int, num_shares: int, min_units: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    seq_lens = torch.randint(0, 400, (300,), generator=generator, dtype=torch.int32)
    shares = plan_shares(
        seq_lens.to(triton_device),
        window=window,
        unit_tokens=16,
        min_units=min_units,
        num_shares=num_shares,
        num_heads=3,
    )
    every_unit = [
        (seq, unit) for seq, length in enumerate(seq_lens.tolist()) for unit in range(units(length, window, 16))
    ]
    per_share = max(min_units, -(-len(every_unit) // num_shares))
    for index, (seq, unit, count, size) in enumerate(shares.words.tolist()):
        mine = every_unit[index * per_share : (index + 1) * per_share]
        assert (count, size) == (len(mine), per_share)
        assert not mine or mine[0] == (seq, unit)
    assert shares.arrivals.tolist() == [[0, 0, 0]] * num_shares


# ---- on the device --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (16, 8, 128), (32, 4, 64), (5, 5, 96)]
)
def test_half_precisions_are_as_accurate_as_the_reference(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    lengths = [5000, 1, 16, 333, 64, 65, 2048, 700]
    sequences = decodes(torch.device("cuda"), lengths, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    check(queries(sequences, num_heads), sequences)
    check(queries(sequences, num_heads), sequences, window=100, soft_cap=20.0)


@pytest.mark.gpu
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("lengths", [[9000], [5000, 1, 700]], ids=str)
def test_parts_in_half_precision_are_put_together_either_way(lengths: list[int]) -> None:
    sequences = decodes(torch.device("cuda"), lengths, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    check(queries(sequences, 32), sequences, 33)
    check(queries(sequences, 32), sequences, 33, window=2000)


@pytest.mark.gpu
def test_an_fp8_cache_gives_the_result_of_its_values_in_bfloat16() -> None:
    sequences = decodes(torch.device("cuda"), [3000, 17, 200], num_kv_heads=8, head_dim=128)
    stored = without_poison(sequences.kv).to(torch.float8_e4m3fn)
    scales = {name: torch.tensor(value, device="cuda") for name, value in (("k_scale", 0.5), ("v_scale", 2.0))}
    q = queries(sequences, 32, torch.bfloat16)
    small = attend(q, dataclasses.replace(sequences, kv=stored), 9, **scales)
    same = attend(q, dataclasses.replace(sequences, kv=stored.bfloat16()), 9, **scales)
    # Sums in float32 of the two kernels may differ in their last bits, so a result may round to a neighbouring value.
    torch.testing.assert_close(small, same, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-6)


@pytest.mark.gpu
def test_blocks_beyond_4_gib_of_elements_are_found() -> None:
    small = decodes(torch.device("cuda"), [40, 300], dtype=torch.bfloat16)
    far = (1 << 32) // small.kv[0].numel() + 1
    kv = torch.empty((far + small.kv.shape[0], *small.kv.shape[1:]), dtype=torch.bfloat16, device="cuda")
    kv[far:] = small.kv
    batch = dataclasses.replace(small.batch, block_tables=small.batch.block_tables + far)
    q = queries(small, 4)
    assert torch.equal(attend(q, PagedSequences(kv, batch, small.query_lens)), attend(q, small))


@pytest.mark.gpu
@pytest.mark.parametrize("num_seqs", [1, 3])  # the parts of a single sequence may be added by a separate kernel
def test_a_captured_graph_serves_later_lengths(num_seqs: int) -> None:
    sequences = decodes(torch.device("cuda"), [600] * num_seqs, dtype=torch.bfloat16, num_kv_heads=8, head_dim=128)
    clean = dataclasses.replace(sequences, kv=without_poison(sequences.kv))
    q = queries(sequences, 32)
    attend(q, clean)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = prepare(clean.batch, clean.kv, num_heads=32)
        rule = AttentionRule(128**-0.5)
        results = [paged_attention(q, clean.kv, LAYER, batch, rule, out=None) for _ in range(2)]
    for lengths in ([600, 600, 600], [1, 599, 0], [17, 300, 64], [64, 0, 500]):
        clean.batch.seq_lens.copy_(torch.tensor(lengths[-num_seqs:], dtype=torch.int32))
        graph.replay()
        expected = attend(q, clean)
        assert all(torch.equal(result, expected) for result in results)
