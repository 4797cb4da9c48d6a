"""Settings of speculation: what is taken, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from baton.engine.core.speculation.config import MAX_DRAFTS, SpeculativeConfig, make_drafter
from baton.engine.core.speculation.drafter import DeviceDrafter
from baton.engine.core.speculation.ngram import NgramDrafter
from baton.engine.core.speculation.suffix import SuffixDrafter
from baton.engine.strict_model import problems_of

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def config(**given: Any) -> SpeculativeConfig:
    return SpeculativeConfig.model_validate(given)


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({}, "method", "is missing"),
        (
            {"method": "ngrams"},
            "method",
            "'mtp', 'draft_model', 'eagle3'; did you mean 'ngram'",
        ),
        ({"method": "mtp", "prompt_lookup_max": 3}, "prompt_lookup_max", "is for 'ngram'"),
        ({"method": "mtp", "model": "deepseek"}, "model", "is for 'draft_model' and 'eagle3'"),
        ({"method": "eagle3", "num_speculative_tokens": 2}, "model", "is required with 'eagle3'"),
        ({"method": "eagle"}, "method", "is EAGLE before its third version"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "model", "is required with 'draft_model'"),
        ({"model": "small"}, "num_speculative_tokens", "is required with 'draft_model'"),
        (
            {"model": "small", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1},
            "draft_tensor_parallel_size",
            "as the model is",
        ),
        ({"method": "medusa"}, "method", "which needs trained heads"),
        ({**NGRAM, "num_speculative_token": 3}, "num_speculative_token", "did you mean 'num_speculative_tokens'"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens", "is 0, must be at least 1"),
        ({**NGRAM, "num_speculative_tokens": 16}, "num_speculative_tokens", "is 16, must be at most 15"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens", "is true, must be a number"),
        ({"method": "ngram"}, "num_speculative_tokens", "is required with 'ngram'"),
        ({**NGRAM, "model": "draft"}, "model", "is for 'draft_model' and 'eagle3'"),
        ({**NGRAM, "speculative_token_tree": "[(0,)]"}, "speculative_token_tree", "one sequence"),
        ({**NGRAM, "prompt_lookup_max": 0}, "prompt_lookup_max", "at least 1"),
        ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min", "prompt_lookup_max .3."),
        ({**NGRAM, "suffix_decoding_min_token_prob": 0.5}, "suffix_decoding_min_token_prob", "is for 'suffix'"),
        ({"method": "suffix", "prompt_lookup_max": 4}, "prompt_lookup_max", "is for 'ngram'"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob", "at most 1"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, "suffix_decoding_max_tree_depth", "at least 2"),
    ],
)
def test_what_cannot_work_is_refused_by_name(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**given)
    problem = next(problems_of(caught.value))
    assert problem[0] == field
    assert message.replace(".3.", "(3)") in problem[1]


def test_only_methods_that_work_are_suggested_for_an_unknown_one() -> None:
    with pytest.raises(ValidationError) as caught:
        config(method="zzzz")
    assert not any(name in str(caught.value) for name in ("medusa", "custom_class"))


@pytest.mark.parametrize(
    ("given", "lookups"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": None}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_one_bound_of_lookups_is_as_the_other(given: dict[str, Any], lookups: tuple[int, int]) -> None:
    made = config(**NGRAM, **given)
    assert (made.prompt_lookup_min, made.prompt_lookup_max) == lookups


@pytest.mark.parametrize("given", [NGRAM, {"method": "suffix"}])
def test_a_config_can_be_passed_on_whole(given: dict[str, Any]) -> None:
    made = config(**given)
    assert config(**made.model_dump()) == made


def test_suffix_needs_nothing_but_its_name() -> None:
    assert config(method="suffix").num_speculative_tokens == MAX_DRAFTS


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "qwen3_next_mtp"])
def test_a_draft_layer_has_one_name_and_guesses_one_token_where_no_number_is_given(method: str) -> None:
    made = config(method=method)
    assert (made.method, made.num_speculative_tokens) == ("mtp", 1)
    assert config(method=method, num_speculative_tokens=3).num_speculative_tokens == 3


def test_a_model_is_a_draft_model_where_no_method_is_given() -> None:
    made = config(model="small", num_speculative_tokens=2)
    assert made == config(method="draft_model", model="small", num_speculative_tokens=2)
    assert made.guesses_on_device


def test_each_method_has_its_drafter() -> None:
    assert isinstance(make_drafter(config(method="mtp")), DeviceDrafter)
    assert isinstance(make_drafter(config(**NGRAM)), NgramDrafter)
    assert isinstance(make_drafter(config(method="suffix")), SuffixDrafter)
