"""Attention of few tokens with keys split over programs, against the reference, for any number of splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch, AttentionRule, reference
from baton.kernels.kv_rows import kv_rows

from ...helpers.aot import compile_for_h200
from .kernel_checks import assert_as_accurate, paged_sequences, poisoned_behind, without_poison
from .prefill_attention_inputs import LAYER, MIXED, on_device, queries

few = pytest.importorskip("baton.kernels.attention.gpu.prefill_split_kv")
from baton.kernels.attention import gpu  # noqa: E402
from baton.kernels.query_tiles import SHORT_ROWS, plan_prefill  # noqa: E402

pytestmark = pytest.mark.exhaustive

ONE_KEY = 1  # minimum keys of a split, so that short sequences are split, too


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "LEAST_KEYS", ONE_KEY)


def attend(
    q: Tensor, kv: Tensor, batch: AttentionBatch, splits: int, first_seq: int = 0, layers: int = 1, **options: Any
) -> Tensor:
    heads = {"num_heads": q.shape[1], "num_kv_heads": kv.shape[1], "head_dim": q.shape[2]}
    plan = plan_prefill(batch, first_seq, **heads, rows=SHORT_ROWS)
    value_dim = kv_rows(kv, q.shape[2]).value_dim
    split = few.key_split(plan, q.shape[1], value_dim, splits)
    split.sums.fill_(float("nan"))
    split.tops.fill_(float("nan"))
    plan = replace(plan, split=split)
    rule = AttentionRule(q.shape[2] ** -0.5, **options)
    for _ in range(layers):
        out = torch.full((*q.shape[:2], value_dim), float("nan"), dtype=q.dtype, device=q.device)
        gpu.paged_prefill(q, kv, LAYER, batch, plan, rule, out=out)
        assert not split.arrivals.any()
    return out


def check(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    device: torch.device,
    splits: int,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    slack: float = 3.0,
    **options: Any,
) -> None:
    sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    sizes |= {} if value_dim is None else {"value_dim": value_dim}
    sequences = on_device(paged_sequences(query_lens, seq_lens, dtype=dtype, **sizes), device)
    q = queries(sequences.batch, num_heads, head_dim, dtype)
    result = attend(q, sequences.kv, sequences.batch, splits, **options)
    clean, rule = without_poison(sequences.kv), AttentionRule(head_dim**-0.5, **options)
    exact = reference.paged_attention(q.double(), clean.double(), LAYER, sequences.batch, rule)
    same = reference.paged_attention(q, clean, LAYER, sequences.batch, rule)
    assert_as_accurate(result, exact, same.to(dtype), slack)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2, 3, 16])
def test_the_result_is_right_in_however_many_splits(
    triton_device: torch.device, small_splits: None, splits: int
) -> None:
    check(*MIXED, triton_device, splits)
    check([40], [400], triton_device, splits)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (48, 32), (32, 80)])
def test_values_may_have_another_width_than_keys(
    triton_device: torch.device, small_splits: None, head_dim: int, value_dim: int
) -> None:
    sinks = torch.tensor([0.5, -20.0, 3.0, 1.0], device=triton_device)
    sizes = {"head_dim": head_dim, "value_dim": value_dim}
    check([3, 20], [200, 20], triton_device, 3, **sizes, sinks=sinks, window=90)


@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (7, 1), (6, 2), (144, 1)])
def test_query_heads_share_key_value_heads_in_any_ratio(
    triton_device: torch.device, small_splits: None, num_heads: int, num_kv_heads: int
) -> None:
    check([3, 20], [200, 20], triton_device, 3, num_heads=num_heads, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_heads_have_any_number_of_dimensions(
    triton_device: torch.device, small_splits: None, dtype: torch.dtype, head_dim: int
) -> None:
    check([3, 40], [200, 40], triton_device, 3, head_dim=head_dim, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 20, 64, 100, 500])
def test_a_window_hides_older_keys(triton_device: torch.device, small_splits: None, window: int) -> None:
    check([1, 70, 20], [150, 200, 300], triton_device, 3, window=window)


@pytest.mark.parametrize("window", [20, 100])
def test_blocks_behind_the_window_may_hold_nan(triton_device: torch.device, small_splits: None, window: int) -> None:
    sequences = on_device(paged_sequences([1, 20], [150, 200], head_dim=16), triton_device)
    clean = replace(sequences, kv=without_poison(sequences.kv))
    q, kv = queries(sequences.batch, 4, 16, torch.float32), poisoned_behind(clean, window).kv
    result = attend(q, kv, sequences.batch, 3, window=window)
    assert torch.equal(result, attend(q, clean.kv, sequences.batch, 3, window=window))


@pytest.mark.slow
def test_scores_are_capped_and_sinks_take_weight_once(triton_device: torch.device, small_splits: None) -> None:
    sinks = torch.tensor([0.5, -20.0, 3.0, 20.0], device=triton_device)
    check(*MIXED, triton_device, 3, soft_cap=0.5)
    check([9], [300], triton_device, 3, sinks=sinks)
    check([9], [300], triton_device, 3, sinks=sinks, window=150, soft_cap=20.0, slack=30.0)


def test_a_cache_has_scales(triton_device: torch.device, small_splits: None) -> None:
    sequences = on_device(paged_sequences([5], [300], head_dim=16), triton_device)
    scales = {"k_scale": torch.tensor(0.25, device=triton_device), "v_scale": torch.tensor([0.5], device=triton_device)}
    q = queries(sequences.batch, 4, 16, torch.float32)
    clean = without_poison(sequences.kv)
    result = attend(q, clean, sequences.batch, 3, **scales)
    rule = AttentionRule(0.25, **scales)
    expected = reference.paged_attention(q.double(), clean.double(), LAYER, sequences.batch, rule)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_few_keys_stay_with_one_program(triton_device: torch.device) -> None:
    """The workspace stays poisoned: only a second program would have written a part to it."""
    sequences = on_device(paged_sequences([100], [few.LEAST_KEYS], head_dim=16), triton_device)
    batch, q = sequences.batch, queries(sequences.batch, 4, 16, torch.float32)
    plan = plan_prefill(batch, 0, num_heads=4, num_kv_heads=2, head_dim=16, rows=SHORT_ROWS)
    plan = replace(plan, split=few.key_split(plan, 4, 16, 4))
    plan.split.tops.fill_(float("nan"))
    gpu.paged_prefill(q, sequences.kv, LAYER, batch, plan, AttentionRule(0.25), out=torch.empty_like(q))
    assert plan.split.tops.isnan().all()


@pytest.mark.slow
def test_padding_becomes_zero_and_changes_nothing(triton_device: torch.device, small_splits: None) -> None:
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
    result = attend(q, sequences.kv, padded, 3)
    assert torch.equal(result[:tokens], attend(q[:tokens], sequences.kv, batch, 3))
    assert torch.equal(result[tokens:], torch.zeros_like(result[tokens:]))


@pytest.mark.slow
def test_every_layer_leaves_the_workspace_ready_for_the_next(triton_device: torch.device, small_splits: None) -> None:
    sequences = on_device(paged_sequences([9], [300], head_dim=16), triton_device)
    q = queries(sequences.batch, 4, 16, torch.float32)
    assert torch.equal(
        attend(q, sequences.kv, sequences.batch, 3, layers=3), attend(q, sequences.kv, sequences.batch, 3)
    )


def test_nan_in_a_query_makes_its_row_nan_and_no_other(triton_device: torch.device, small_splits: None) -> None:
    sequences = on_device(paged_sequences([30], [300], head_dim=16), triton_device)
    q = queries(sequences.batch, 4, 16, torch.float32)
    q[7, 2, 5] = float("nan")
    spoiled = torch.zeros(30, 4, dtype=torch.bool, device=triton_device)
    spoiled[7, 2] = True
    assert torch.equal(attend(q, sequences.kv, sequences.batch, 3).isnan().any(-1), spoiled)


def test_steps_that_leave_no_room_for_three_splits_are_not_split(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 132 multiprocessors with 8 KV heads, 128 tokens of one sequence are split, 192 are not."""
    monkeypatch.setattr(few, "multiprocessors", lambda device: 132)
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "value_dim": 128}

    def plan(*query_lens: int) -> Any:
        sequences = on_device(paged_sequences(query_lens, query_lens, num_kv_heads=1, head_dim=16), triton_device)
        return few.plan_split_prefill(sequences.batch, 0, **heads)

    assert plan(128).split.count == 3
    assert plan(16).split.count == 11
    assert plan(192) is None
    assert plan(*[2] * 64) is None


SIGNATURE = {
    **{"q": "*bf16", "kv": "*bf16", "out": "*bf16", "score_unit": "fp32", "cap_scale": "fp32"},
    **dict.fromkeys(("items", "num_tiles", "arrivals", "block_tables"), "*i32"),
    **dict.fromkeys(("sums", "tops"), "*fp32"),
    **dict.fromkeys(("layer", "window", "num_heads", "num_splits"), "i32"),
    **{f"{name}_stride": "i32:16" for name in ("q_token", "q_head", "out_token", "out_head")},
    **{f"{name}_stride": "i32:16" for name in ("block", "head", "layer", "table")},
    "to_value": "i32:16",
}


@pytest.mark.parametrize("options", [{}, {"HAS_WINDOW": True, "HAS_CAP": True}], ids=str)
def test_two_programs_fit_a_multiprocessor_and_nothing_spills(options: dict[str, bool]) -> None:
    constants = {"sinks": None, "k_scale": None, "v_scale": None, "GROUP": 4, "PACK": 4, "ROWS": 64, "KEYS": 64}
    constants |= {"VALUE_DIM": 128, "PADDED_VALUE_DIM": 128, "TOKEN_STRIDE": 128}
    constants |= {"DIM": 128, "PADDED_DIM": 128, "BLOCK_SIZE": 16, "LEAST_KEYS": few.LEAST_KEYS}
    constants |= {"HAS_WINDOW": False, "HAS_CAP": False, **options}
    kernel = compile_for_h200(few.attend_key_split, SIGNATURE, constants, num_warps=4, num_stages=3)
    assert kernel.wgmma
    assert kernel.widest_load_bytes == 16
    assert few.PROGRAMS * (kernel.shared_bytes + 1024) <= 228 * 1024
    assert few.PROGRAMS * 128 * kernel.registers <= 65536


def test_two_programs_of_wide_heads_fit_a_multiprocessor_and_spill_little() -> None:
    constants = {"sinks": None, "k_scale": None, "v_scale": None, "GROUP": 2, "PACK": 2, "ROWS": 64, "KEYS": 32}
    constants |= {"VALUE_DIM": 256, "PADDED_VALUE_DIM": 256, "TOKEN_STRIDE": 256}
    constants |= {"DIM": 256, "PADDED_DIM": 256, "BLOCK_SIZE": 16, "LEAST_KEYS": few.LEAST_KEYS}
    constants |= {"HAS_WINDOW": True, "HAS_CAP": True}
    options = {"num_warps": 4, "num_stages": 2, "max_spill_bytes": 96}
    kernel = compile_for_h200(few.attend_key_split, SIGNATURE, constants, **options)
    assert kernel.wgmma
    assert few.PROGRAMS * (kernel.shared_bytes + 1024) <= 228 * 1024
    assert few.PROGRAMS * 128 * -(-kernel.registers // 8) * 8 <= 65536


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"soft_cap": 20.0}], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (16, 8, 128), (64, 8, 64)])
def test_split_keys_in_bfloat16_equal_the_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, options: Any
) -> None:
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": torch.bfloat16}
    for query_lens, seq_lens in (([128], [128]), ([100], [5000]), ([1, 5, 40], [700, 90, 40])):
        for splits in (1, 4):
            check(query_lens, seq_lens, torch.device("cuda"), splits, **heads, **options)


@pytest.mark.gpu
def test_a_captured_graph_serves_other_lengths() -> None:
    device = torch.device("cuda")
    first = on_device(paged_sequences([50, 78], [300, 2000], head_dim=128, dtype=torch.bfloat16), device)
    q = queries(first.batch, 4, 128, torch.bfloat16)
    attend(q, first.kv, first.batch, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend_unchecked(q, first.kv, first.batch)
    for query_lens in ([127, 1], [100, 28]):
        first.batch.query_start.copy_(torch.tensor([0, query_lens[0], 128], dtype=torch.int32))
        graph.replay()
        assert torch.equal(captured, attend_unchecked(q, first.kv, first.batch))


def attend_unchecked(q: Tensor, kv: Tensor, batch: AttentionBatch) -> Tensor:
    out = torch.full_like(q, float("nan"))
    plan = few.plan_split_prefill(
        batch, 0, num_heads=q.shape[1], num_kv_heads=kv.shape[1], head_dim=q.shape[2], value_dim=q.shape[2]
    )
    gpu.paged_prefill(q, kv, LAYER, batch, plan, AttentionRule(q.shape[2] ** -0.5), out=out)
    return out
