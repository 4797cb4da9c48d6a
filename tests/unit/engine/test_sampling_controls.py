"""Each control of `SamplingParams` changes the engine's tokens as documented."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest

from baton.engine import LLM, CompletionOutput, InvalidPrompt, InvalidSamplingParams, SamplingParams

IDS = [10, 20, 30, 40]
EOS = 2


def complete(llm: LLM, **params: Any) -> CompletionOutput:
    defaults = {"temperature": 0.0, "max_tokens": 24}
    return llm.generate(IDS, SamplingParams(**{**defaults, **params}), use_tqdm=False)[0].outputs[0]


def test_min_tokens_holds_every_stop_token_back_and_no_longer(llm: LLM) -> None:
    wants_to_stop = {EOS: 100.0, 7: 99.0}
    assert complete(llm, logit_bias=wants_to_stop).token_ids == [EOS]
    held = complete(llm, logit_bias=wants_to_stop, stop_token_ids=[7], min_tokens=5)
    assert len(held.token_ids) == 6
    assert (held.token_ids[-1], held.finish_reason) == (EOS, "stop")
    assert not {EOS, 7} & set(held.token_ids[:5])


def test_ignore_eos_neither_ends_nor_masks(llm: LLM) -> None:
    output = complete(llm, logit_bias={EOS: 100.0}, ignore_eos=True, max_tokens=4)
    assert (output.token_ids, output.finish_reason) == ([EOS] * 4, "length")
    masked_would_differ = complete(llm, logit_bias={EOS: 100.0}, ignore_eos=True, max_tokens=4, min_tokens=4)
    assert masked_would_differ.token_ids == [EOS] * 4


def test_max_tokens_none_goes_on_to_the_models_length(llm: LLM) -> None:
    output = complete(llm, max_tokens=None, ignore_eos=True)
    assert len(IDS) + len(output.token_ids) == llm.engine.core.config.max_model_len
    assert output.finish_reason == "length"


def test_logit_bias_moves_tokens_up_and_down(llm: LLM) -> None:
    free = complete(llm, ignore_eos=True)
    assert complete(llm, logit_bias={99: 100.0}).token_ids == [99] * 24
    banned = free.token_ids[0]
    assert banned not in complete(llm, logit_bias={banned: -100.0}, ignore_eos=True).token_ids


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_allowed_token_ids_are_the_only_ones(llm: LLM, temperature: float) -> None:
    output = complete(llm, allowed_token_ids=[5, 31, 32, 255], temperature=temperature, seed=0)
    assert set(output.token_ids) <= {5, 31, 32, 255}
    if temperature:
        assert len(set(output.token_ids)) == 4


def test_bad_words_are_banned_as_sequences_not_as_tokens(llm: LLM) -> None:
    free = complete(llm, ignore_eos=True).token_ids
    first, second = free[3:5]
    kept = complete(llm, ignore_eos=True, bad_words_token_ids=[[first, second]]).token_ids
    assert kept[:4] == free[:4]
    assert kept[4] != second
    assert (first, second) not in itertools.pairwise(kept)


@pytest.mark.parametrize("temperature", [0.0, 5.0])
@pytest.mark.parametrize("also", [{"bad_words_token_ids": [[5, 5]]}, {"stop_token_ids": [5], "min_tokens": 1}])
def test_where_nothing_is_left_to_draw_the_request_ends_with_the_reason(
    llm: LLM, also: dict[str, Any], temperature: float
) -> None:
    with pytest.raises(InvalidPrompt, match=r"allowed_token_ids leaves no token to draw"):
        complete(llm, allowed_token_ids=[5], temperature=temperature, **also)
    assert complete(llm, allowed_token_ids=[5], max_tokens=1, temperature=temperature).token_ids == [5]


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_make_the_output_repeat_itself_less(llm: LLM, penalty: str) -> None:
    narrow = {"allowed_token_ids": list(range(60, 72)), "ignore_eos": True, "max_tokens": 60}
    free = Counter(complete(llm, **narrow).token_ids)
    penalized = Counter(complete(llm, **narrow, **{penalty: 2.0}).token_ids)
    assert len(penalized) > len(free)


def test_top_k_of_one_min_p_of_one_and_a_tiny_top_p_are_all_greedy(llm: LLM) -> None:
    greedy = complete(llm, ignore_eos=True).token_ids
    for control in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}, {"top_p": 0.0}):
        assert complete(llm, temperature=1.5, seed=1, ignore_eos=True, **control).token_ids == greedy
    assert complete(llm, temperature=1.5, seed=1, ignore_eos=True).token_ids != greedy


def test_a_seed_fixes_the_tokens_and_another_changes_them(llm: LLM) -> None:
    first, again, other = (complete(llm, temperature=1.0, seed=s, ignore_eos=True).token_ids for s in (1, 1, 2))
    assert first == again != other


def test_draws_follow_the_models_distribution(llm: LLM) -> None:
    """400 draws of one token over four allowed ones: each within five standard deviations of its probability."""
    allowed = [40, 50, 60, 70]
    drawn: Counter[int] = Counter()
    weight: dict[int, float] = {}
    for first_seed in (0, 1000, 2000, 3000):
        params = SamplingParams(
            n=100, seed=first_seed, max_tokens=1, allowed_token_ids=allowed, temperature=3.0, logprobs=0
        )
        for output in llm.generate(IDS, params, use_tqdm=False)[0].outputs:
            assert output.logprobs is not None
            (token,) = output.token_ids
            drawn[token] += 1
            weight[token] = math.exp(output.logprobs[0][token].logprob / 3.0)
    assert set(drawn) == set(allowed)
    for token in allowed:
        p = weight[token] / sum(weight.values())
        assert abs(drawn[token] - 400 * p) < 5 * (400 * p * (1 - p)) ** 0.5


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [256]},
        {"logit_bias": {256: 1.0}},
        {"allowed_token_ids": [256]},
        {"bad_words_token_ids": [[3, 256]]},
    ],
)
def test_token_ids_that_the_model_lacks_are_refused(llm: LLM, params: dict[str, Any]) -> None:
    with pytest.raises((InvalidPrompt, InvalidSamplingParams), match="256"):
        complete(llm, **params)
