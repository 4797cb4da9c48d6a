"""Invalid batches, rules and plans of attention are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from baton.kernels.attention import AttentionBatch, AttentionRule, paged_attention

from .attention_cases import LAYER, attend, queries
from .kernel_checks import paged_sequences

pytestmark = pytest.mark.exhaustive


def test_heads_that_do_not_divide_are_refused() -> None:
    sequences = paged_sequences([1], [4])
    with pytest.raises(ValueError, match="do not divide"):
        attend(queries(sequences, 3, 64, torch.float32), sequences)


def test_an_output_of_another_shape_is_refused() -> None:
    sequences = paged_sequences([1], [4])
    q = queries(sequences, 4, 64, torch.float32)
    with pytest.raises(ValueError, match="give contiguous"):
        paged_attention(q, sequences.kv, LAYER, sequences.batch, AttentionRule(1.0), out=torch.empty(2, 4, 64))


def test_another_number_of_sinks_than_of_query_heads_is_refused() -> None:
    sequences = paged_sequences([1], [4])
    with pytest.raises(ValueError, match="one for each of 4 query heads"):
        attend(queries(sequences, 4, 64, torch.float32), sequences, sinks=torch.zeros(3))


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ({"window": 0}, "give at least 1"),
        ({"soft_cap": 0.0}, "more than 0"),
        ({"soft_cap": math.nan}, "more than 0"),
        ({"sinks": torch.zeros(4).double()}, r"sinks is torch\.float64"),
        ({"sinks": torch.zeros(8)[::2]}, "give contiguous"),
        ({"k_scale": torch.ones(2)}, "one value for the whole layer"),
        ({"v_scale": torch.tensor(1)}, r"v_scale is torch\.int64"),
    ],
)
def test_an_invalid_rule_is_refused(option: dict[str, Any], complaint: str) -> None:
    with pytest.raises((ValueError, TypeError), match=complaint):
        AttentionRule(1.0, **option)


@pytest.mark.parametrize("score", [-40.0, -0.3, 0.0, 2.0, 40.0])
def test_the_score_units_of_prefill_kernels_lead_to_the_weights_of_the_formula(score: float) -> None:
    """`score` is the product of query and key, before the scale."""
    plain, capped = AttentionRule(0.125), AttentionRule(0.125, soft_cap=3.0)
    assert 2 ** (plain.score_unit * score) == pytest.approx(math.exp(0.125 * score))
    bounded = 1 - 2 / (2 ** (capped.cap_scale * score) + 1)
    assert 2 ** (capped.score_unit * bounded) == pytest.approx(math.exp(3 * math.tanh(0.125 * score / 3)))


# ---- the plan of a step ---------------------------------------------------------------------------------------------


def test_a_plan_places_every_token() -> None:
    tables = torch.tensor([[7, 0], [2, 5], [4, 0]], dtype=torch.int32)
    batch = AttentionBatch.plan([1, 1, 3], [4, 18, 3], tables, 16)
    assert batch.query_start.tolist() == [0, 1, 2, 5]
    assert batch.positions.tolist() == [3, 17, 0, 1, 2]
    assert batch.slots.tolist() == [7 * 16 + 3, 5 * 16 + 1, 64, 65, 66]
    assert (batch.num_seqs, batch.num_tokens, batch.num_decodes) == (3, 5, 2)
    assert (batch.max_query_len, batch.max_seq_len) == (3, 18)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "complaint"),
    [([1], [1, 1], "one of each"), ([0], [4], "from 1 to"), ([5], [4], "from 1 to"), ([1], [17], "widen")],
)
def test_an_invalid_plan_is_refused(query_lens: list[int], seq_lens: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        AttentionBatch.plan(query_lens, seq_lens, torch.zeros(1, 1, dtype=torch.int32), 16)


def test_tables_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match=r"block_tables is torch\.int64"):
        AttentionBatch.plan([1], [4], torch.zeros(1, 1, dtype=torch.int64), 16)


def test_tables_with_gaps_are_refused() -> None:
    with pytest.raises(TypeError, match=r"block_tables is .* with stride"):
        AttentionBatch.plan([1], [4], torch.zeros(1, 4, dtype=torch.int32)[:, ::2], 16)
