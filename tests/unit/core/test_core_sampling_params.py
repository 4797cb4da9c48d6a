"""Sampling parameters: the forms that users may give, and the values that are refused."""

from __future__ import annotations

import msgspec
import pytest

from baton.engine.core.sampling import MAX_TOP_K, InvalidSamplingParams, SamplingParams, as_decoded


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_a_single_string_is_a_list_of_one_and_not_of_its_characters(field: str) -> None:
    assert getattr(SamplingParams(**{field: "END"}), field) == ["END"]


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "logit_bias", "bad_words", "bad_words_token_ids"])
def test_none_asks_for_nothing(field: str) -> None:
    params = SamplingParams(**{field: None})
    assert params == SamplingParams()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_two_requests_share_no_list() -> None:
    first, second = SamplingParams(stop=None), SamplingParams(stop=None)  # type: ignore[arg-type]
    assert first.stop is not second.stop


@pytest.mark.parametrize("top_k", [MAX_TOP_K + 1, 2**63, 2**64, -2])
def test_a_top_k_that_no_tensor_holds_is_refused(top_k: int) -> None:
    with pytest.raises(InvalidSamplingParams, match="top_k"):
        SamplingParams(top_k=top_k)


@pytest.mark.parametrize("top_k", [-1, 0, 1, MAX_TOP_K])
def test_any_other_top_k_is_taken(top_k: int) -> None:
    assert SamplingParams(top_k=top_k).top_k == top_k


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -5.0])
def test_values_that_are_no_setting_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidSamplingParams) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "meant"),
    [(None, None), (-1, None), (0, 0), (7, 7), (-5, 2**63 - 5), (-(2**63), 0), (2**63 - 1, 2**63 - 1)],
)
def test_a_negative_seed_stands_for_another_one_and_minus_one_for_none(given: int | None, meant: int | None) -> None:
    """The same for scripts and for requests over HTTP."""
    assert SamplingParams(seed=given).seed == meant
    assert as_decoded(SamplingParams(seed=given)).seed == meant


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**30])
def test_a_seed_has_63_bits(seed: int) -> None:
    with pytest.raises(InvalidSamplingParams, match="seed: must be from"):
        SamplingParams(seed=seed)


def test_a_nucleus_may_be_of_nothing() -> None:
    assert SamplingParams(top_p=0).top_p == 0
    with pytest.raises(InvalidSamplingParams, match="top_p: must be from 0 to 1"):
        SamplingParams(top_p=-0.1)
