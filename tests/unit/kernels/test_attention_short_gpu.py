"""Decode attention of one short sequence against the reference, with NaN in memory that must not be read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels.attention import SHORT_CONTEXTS, AttentionBatch, AttentionRule, reference

from ...helpers.aot import compile_for_h200
from .decode_attention_inputs import LAYER, decodes, drafted, on_device, queries
from .kernel_checks import PagedSequences, assert_as_accurate, paged_sequences, without_poison

short = pytest.importorskip("baton.kernels.attention.gpu.decode_short")
from baton.kernels.attention.gpu import paged_attention, prepare  # noqa: E402
from baton.kernels.attention.gpu.decode_plan import DecodePlan, ShortPlan, prepared  # noqa: E402

pytestmark = pytest.mark.exhaustive

LONGEST = SHORT_CONTEXTS[-1]
BESIDE_A_BORDER = (1, short.KEYS - 1, short.KEYS, short.KEYS + 1, 2 * short.KEYS + 1, 1024, LONGEST)


def longest(sequences: PagedSequences, most: int = LONGEST) -> AttentionBatch:
    """Return a batch as in a captured step: the sequence may have any length up to `most`."""
    return dataclasses.replace(sequences.batch, max_seq_len=most)


def attend(q: Tensor, sequences: PagedSequences, batch: AttentionBatch, layers: int = 1, **options: Any) -> Tensor:
    batch = prepare(batch, sequences.kv, num_heads=q.shape[1], head_dim=q.shape[2])
    plan = prepared(batch).decode
    assert isinstance(plan, ShortPlan)
    assert (prepared(batch).prefill is None) == (batch.num_decodes == batch.num_tokens or not batch.num_decodes)
    plan.sums.fill_(float("nan"))
    plan.tops.fill_(float("nan"))
    rule = AttentionRule(q.shape[2] ** -0.5, **options)
    for _ in range(layers):
        out = torch.full((*q.shape[:2], plan.sums.shape[-1]), float("nan"), dtype=q.dtype, device=q.device)
        paged_attention(q, sequences.kv, LAYER, batch, rule, out=out)
    return out


def check(q: Tensor, sequences: PagedSequences, batch: AttentionBatch | None = None, **options: Any) -> None:
    check_rows(attend(q, sequences, batch or longest(sequences), **options), q, sequences, **options)


def check_rows(result: Tensor, q: Tensor, sequences: PagedSequences, **options: Any) -> None:
    clean, rule = without_poison(sequences.kv), AttentionRule(q.shape[2] ** -0.5, **options)
    exact = reference.paged_attention(q.double(), clean.double(), LAYER, sequences.batch, rule)
    same = reference.paged_attention(q, clean, LAYER, sequences.batch, rule)
    assert_as_accurate(result, exact, same, slack=8.0 if q.dtype == torch.float32 else 2.0)


@pytest.mark.parametrize("seq_len", BESIDE_A_BORDER)
def test_the_result_is_right_however_many_programs_share_the_keys(triton_device: torch.device, seq_len: int) -> None:
    sequences = decodes(triton_device, [seq_len])
    check(queries(sequences, 4), sequences)


@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 2), (3, 1), (8, 1), (16, 1)])
@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
def test_heads_come_in_any_ratio_and_any_multiple_of_16_dimensions(
    triton_device: torch.device, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    dtype = torch.float32 if head_dim <= 128 else torch.float16
    sequences = decodes(triton_device, [short.KEYS + 40], num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    check(queries(sequences, num_heads), sequences)


@pytest.mark.parametrize("window", [1, 16, short.KEYS, 1000])
def test_a_window_hides_older_keys(triton_device: torch.device, window: int) -> None:
    sequences = decodes(triton_device, [2 * short.KEYS + 5])
    check(queries(sequences, 4), sequences, window=window)


@pytest.mark.slow
@pytest.mark.parametrize("seq_len", [5, 2 * short.KEYS + 5])
def test_scores_are_capped_sinks_take_weight_once_and_scales_count(triton_device: torch.device, seq_len: int) -> None:
    sequences = decodes(triton_device, [seq_len])
    sinks = torch.tensor([0.5, -3.0, 4.0, 100.0], device=triton_device)
    scales = {"k_scale": torch.tensor(0.25, device=triton_device), "v_scale": torch.tensor([3.0], device=triton_device)}
    check(queries(sequences, 4) * 20, sequences, soft_cap=5.0)
    check(queries(sequences, 4), sequences, sinks=sinks)
    check(queries(sequences, 4), sequences, **scales)


def test_wide_heads_have_windows_and_caps_too(triton_device: torch.device) -> None:
    sequences = decodes(triton_device, [2 * short.KEYS + 5], head_dim=256, num_kv_heads=1, dtype=torch.float16)
    check(queries(sequences, 2), sequences, soft_cap=5.0, window=150)


def test_the_sequence_may_use_any_row_of_the_block_tables(triton_device: torch.device) -> None:
    sequences = decodes(triton_device, [300])
    tables = torch.full((6, sequences.batch.block_tables.shape[1]), -(2**31), dtype=torch.int32, device=triton_device)
    tables[4] = sequences.batch.block_tables[0]
    rows = torch.tensor([4], dtype=torch.int32, device=triton_device)
    batch = dataclasses.replace(sequences.batch, block_tables=tables, table_rows=rows)
    check(queries(sequences, 4), dataclasses.replace(sequences, batch=batch))


def test_padding_gives_zeros(triton_device: torch.device) -> None:
    sequences = decodes(triton_device, [300])
    batch = dataclasses.replace(longest(sequences), seq_lens=torch.zeros_like(sequences.batch.seq_lens))
    assert not attend(queries(sequences, 4), sequences, batch).any()


@pytest.mark.slow
def test_every_layer_leaves_the_workspace_ready_for_the_next(triton_device: torch.device) -> None:
    sequences = decodes(triton_device, [700])
    q, batch = queries(sequences, 4), longest(sequences)
    assert torch.equal(attend(q, sequences, batch, layers=3), attend(q, sequences, batch))


def test_a_chunk_in_the_same_step_uses_another_kernel(triton_device: torch.device) -> None:
    mixed = paged_sequences([1, 9], [300, 30])
    sequences = PagedSequences(mixed.kv.to(triton_device), on_device(mixed.batch, triton_device), mixed.query_lens)
    check(queries(sequences, 4), sequences)


@pytest.mark.parametrize("seq_len", [1, 100, short.KEYS + 5])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (48, 32), (32, 80)])
def test_values_may_have_another_width_than_keys(
    triton_device: torch.device, head_dim: int, value_dim: int, seq_len: int
) -> None:
    sequences = decodes(triton_device, [seq_len], head_dim=head_dim, value_dim=value_dim, dtype=torch.float16)
    check(queries(sequences, 4, head_dim=head_dim), sequences, window=120)


def few_queries(device: torch.device, query_len: int, seq_len: int, **sizes: Any) -> PagedSequences:
    """Return one sequence with its last tokens in this step; the host knows a maximum of their number only."""
    return drafted(device, [query_len], [seq_len], most=query_len, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("seq_len", [4, short.KEYS - 1, short.KEYS, short.KEYS + 2, 2 * short.KEYS + 3, 700])
@pytest.mark.parametrize("query_len", [2, 3, 4])
def test_each_of_a_few_queries_sees_the_keys_up_to_its_own(
    triton_device: torch.device, query_len: int, seq_len: int
) -> None:
    sequences = few_queries(triton_device, query_len, seq_len)
    check(queries(sequences, 4), sequences)


@pytest.mark.parametrize("window", [1, 2, 3, 16, short.KEYS, 1000])
def test_a_window_begins_elsewhere_for_each_query(triton_device: torch.device, window: int) -> None:
    sequences = few_queries(triton_device, 4, 2 * short.KEYS + 2)
    check(queries(sequences, 4), sequences, window=window)


@pytest.mark.parametrize("options", ["soft_cap", "sinks", "scales"])
def test_rules_hold_for_each_query(triton_device: torch.device, options: str) -> None:
    sequences = few_queries(triton_device, 3, short.KEYS + 1)
    rules: dict[str, dict[str, Any]] = {
        "soft_cap": {"soft_cap": 5.0},
        "sinks": {"sinks": torch.tensor([0.5, -3.0, 4.0, 100.0], device=triton_device)},
        "scales": {
            "k_scale": torch.tensor(0.25, device=triton_device),
            "v_scale": torch.tensor([3.0], device=triton_device),
        },
    }
    check(queries(sequences, 4), sequences, **rules[options])


@pytest.mark.parametrize("sizes", [{"head_dim": 192, "value_dim": 128}, {"head_dim": 48, "value_dim": 32}])
def test_a_few_queries_may_have_values_of_another_width(triton_device: torch.device, sizes: dict[str, int]) -> None:
    sequences = few_queries(triton_device, 3, short.KEYS + 5, **sizes, dtype=torch.float16)
    check(queries(sequences, 4, head_dim=sizes["head_dim"]), sequences)


@pytest.mark.parametrize(("query_len", "seq_len"), [(1, 300), (2, 300), (3, short.KEYS + 1), (0, 0)])
def test_a_step_may_have_fewer_queries_than_the_maximum(
    triton_device: torch.device, query_len: int, seq_len: int
) -> None:
    sequences = few_queries(triton_device, 4, max(seq_len, 4))
    q = queries(sequences, 4)
    starts = torch.tensor([0, query_len], dtype=torch.int32, device=triton_device)
    lens = torch.tensor([seq_len], dtype=torch.int32, device=triton_device)
    padded = dataclasses.replace(longest(sequences), query_start=starts, seq_lens=lens)
    result = attend(q, sequences, padded)
    assert not result[query_len:].any()
    if query_len:
        alone = few_queries(triton_device, query_len, seq_len)
        batch = dataclasses.replace(alone.batch, block_tables=sequences.batch.block_tables)
        check_rows(result[:query_len], q[:query_len], dataclasses.replace(sequences, batch=batch))


@pytest.mark.parametrize(
    ("query_len", "num_heads", "head_dim", "plan"),
    [(17, 1, 64, DecodePlan), (9, 4, 64, None), (33, 1, 64, None), (5, 4, 256, DecodePlan)],
)
def test_more_queries_than_fit_a_program_use_other_kernels(
    triton_device: torch.device, query_len: int, num_heads: int, head_dim: int, plan: type | None
) -> None:
    sequences = few_queries(triton_device, query_len, 300, num_kv_heads=1, head_dim=head_dim, dtype=torch.float16)
    plans = prepared(prepare(sequences.batch, sequences.kv, num_heads=num_heads))
    assert isinstance(plans.decode, plan) if plan else plans.decode is None
    assert (plans.prefill is None) == (plan is not None)


@pytest.mark.parametrize(
    ("seq_lens", "num_heads", "head_dim"), [([LONGEST + 1], 4, 64), ([5, 5], 4, 64), ([5], 66, 64), ([5], 4, 144)]
)
def test_other_steps_use_the_kernel_of_shares(
    triton_device: torch.device, seq_lens: list[int], num_heads: int, head_dim: int
) -> None:
    sequences = decodes(triton_device, seq_lens, head_dim=head_dim)
    assert isinstance(prepared(prepare(sequences.batch, sequences.kv, num_heads=num_heads)).decode, DecodePlan)


SIGNATURE = {
    **dict.fromkeys(("q", "kv", "out"), "*bf16"),
    **dict.fromkeys(("seq_lens", "query_start", "block_tables", "table_rows"), "*i32"),
    **dict.fromkeys(("sums", "tops"), "*fp32"),
    **dict.fromkeys(("layer", "window", "num_splits", "table_width"), "i32"),
    **dict.fromkeys(("scale", "soft_cap"), "fp32"),
    **{f"{name}_stride": "i32:16" for name in ("q_token", "kv_block", "kv_head", "kv_layer")},
    "to_value": "i32:16",
}


@pytest.mark.parametrize(
    ("dim", "heads", "queries", "has_cap"),
    [(128, 8, 1, False), (256, 4, 1, True), (128, 8, 4, False), (128, 8, 8, False)],
)
def test_old_keys_are_read_before_the_wait_and_all_programs_fit_the_device(
    dim: int, heads: int, queries: int, has_cap: bool
) -> None:
    threads = 32 * short.warps_for(dim)
    constants = {"sinks": None, "k_scale": None, "v_scale": None, "HEADS": heads, "GROUP": 4}
    constants |= {"QUERIES": queries, "NEW": 1 if queries == 1 else short.NEW_KEYS, "ROWS": max(16, 4 * queries)}
    constants |= {"DIM": dim, "PADDED_DIM": dim, "VALUE_DIM": dim, "PADDED_VALUE_DIM": dim, "TOKEN_STRIDE": dim}
    constants |= {"KEYS": short.KEYS, "BLOCK_SIZE": 16, "HAS_CAP": has_cap}
    compiled = compile_for_h200(short.attend_split, SIGNATURE, constants, num_warps=threads // 32)
    before, _, after = compiled.ptx.partition("griddepcontrol.wait")
    values_of_a_thread = 2 * short.KEYS * dim // threads
    assert before.count("ld.global.v4.b32") == values_of_a_thread // 8
    assert after
    programs = heads * -(-LONGEST // short.KEYS)
    assert -(-programs // 132) * compiled.registers * threads <= 65536


@pytest.mark.gpu
@pytest.mark.parametrize("seq_len", [1, 128, 129, 1000, 4096])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(16, 8), (32, 8), (32, 4)])
def test_one_short_sequence_in_bfloat16_equals_the_reference(seq_len: int, num_heads: int, num_kv_heads: int) -> None:
    device = torch.device("cuda")
    sequences = decodes(device, [seq_len], num_kv_heads=num_kv_heads, head_dim=128, dtype=torch.bfloat16)
    check(queries(sequences, num_heads), sequences)


@pytest.mark.gpu
def test_a_captured_graph_serves_later_lengths() -> None:
    sequences = decodes(torch.device("cuda"), [4000], dtype=torch.bfloat16, num_kv_heads=8, head_dim=128)
    clean = dataclasses.replace(sequences, kv=without_poison(sequences.kv))
    q = queries(clean, 32)
    attend(q, clean, longest(clean))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = prepare(longest(clean), clean.kv, num_heads=32)
        rule = AttentionRule(128**-0.5)
        results = [paged_attention(q, clean.kv, LAYER, batch, rule, out=None) for _ in range(3)]
    for length in (4000, 1, 129, 640, 0):
        clean.batch.seq_lens.fill_(length)
        graph.replay()
        expected = attend(q, clean, longest(clean))
        assert all(torch.equal(result, expected) for result in results)
