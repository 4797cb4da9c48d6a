"""A row that had nothing to draw gives a token all the same: the request hears of it, and nobody gets that token."""

from __future__ import annotations

from typing import Any

import pytest
from core_harness import Harness, config, request

from baton.engine.core.exclusions import FROM_NOTHING
from baton.engine.core.messages import EngineOutput, EngineRequest, ErrorKind, FinishReason

EXCLUDING: dict[str, dict[str, Any]] = {
    "others alone are allowed": {"allowed_token_ids": [5]},
    "a bad word": {"bad_words_token_ids": [[9, 3], [FROM_NOTHING]]},
    "the end of a bad word": {"bad_words_token_ids": [[7, 8, FROM_NOTHING]]},
    "a stop token too soon": {"stop_token_ids": [FROM_NOTHING], "min_tokens": 3},
}
NOT_EXCLUDING: dict[str, dict[str, Any]] = {
    "it is allowed": {"allowed_token_ids": [5, FROM_NOTHING]},
    "the beginning of a bad word": {"bad_words_token_ids": [[FROM_NOTHING, 4]]},
    "the end of another bad word": {"bad_words_token_ids": [[8, 7, FROM_NOTHING], [6, 7, 8, FROM_NOTHING]]},
    "a stop token in time": {"stop_token_ids": [FROM_NOTHING], "min_tokens": 2},
}


def asked(**sampling: Any) -> EngineRequest:
    """It goes on behind two outputs, and what the prompt ends with is no output."""
    return request("a", [1, 6], output_token_ids=[7, 8], max_tokens=4, **sampling)


def first_output(engine: Harness, of: EngineRequest) -> EngineOutput:
    engine.runner.draws_0 = True
    engine.core.add(of)
    return next(output for _ in range(5) for output in engine.core.step())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sampling", EXCLUDING.values(), ids=EXCLUDING)
def test_a_token_that_its_request_excludes_ends_it_with_the_reason(sampling: dict[str, Any], depth: int) -> None:
    engine = Harness(config(depth=depth))
    output = first_output(engine, asked(**sampling))
    assert (output.token_ids, output.finish_reason) == ([], FinishReason.ERROR)
    assert output.error is not None
    assert output.error.kind is ErrorKind.INVALID
    assert "allowed_token_ids" in output.error.message
    while engine.core.has_work():
        assert engine.core.step() == []
    engine.check_all_given_back()


@pytest.mark.parametrize("sampling", NOT_EXCLUDING.values(), ids=NOT_EXCLUDING)
def test_any_other_is_as_good_as_the_rest(sampling: dict[str, Any]) -> None:
    output = first_output(Harness(config()), asked(**sampling))
    assert output.token_ids == [FROM_NOTHING]
    assert output.error is None
