"""A row without any token to draw ends its request, whose error blames the request or the model."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.core.messages import EngineOutput, EngineRequest, ErrorKind, FinishReason
from baton.engine.core.step import NO_TOKEN
from baton.kernels import sampling

from .core_harness import Harness, config, request

LEAVES_NOTHING: dict[str, dict[str, Any]] = {
    "a bad word": {"allowed_token_ids": [5], "bad_words_token_ids": [[9, 3], [5]]},
    "the end of a bad word": {"allowed_token_ids": [5], "bad_words_token_ids": [[7, 8, 5]]},
    "a stop token too soon": {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 3},
    "one thing each": {
        "allowed_token_ids": [4, 5, 6],
        "bad_words_token_ids": [[8, 6], [4]],
        "stop_token_ids": [5],
        "min_tokens": 4,
    },
}
LEAVES_SOME: dict[str, dict[str, Any]] = {
    "anything": {},
    "some are allowed": {"allowed_token_ids": [5, 6]},
    "another than the bad word": {"allowed_token_ids": [5, 6], "bad_words_token_ids": [[5]]},
    "the beginning of a bad word": {"allowed_token_ids": [5], "bad_words_token_ids": [[5, 4]]},
    "the end of another bad word": {"allowed_token_ids": [5], "bad_words_token_ids": [[8, 7, 5], [6, 7, 8, 5]]},
    "a stop token in time": {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2},
}


def asked(**sampling: Any) -> EngineRequest:
    """Make a request that continues two output tokens; the prompt's end does not count as output."""
    return request("a", [1, 6], output_token_ids=[7, 8], max_tokens=4, **sampling)


def only_output(engine: Harness, of: EngineRequest) -> EngineOutput:
    engine.runner.draws_nothing = True
    engine.core.add(of)
    (output,) = [output for _ in range(5) for output in engine.core.step()]
    assert not engine.core.has_work()
    engine.check_all_given_back()
    return output


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sampling", LEAVES_NOTHING.values(), ids=LEAVES_NOTHING)
def test_a_request_that_leaves_no_token_is_refused(sampling: dict[str, Any], depth: int) -> None:
    output = only_output(Harness(config(depth=depth)), asked(**sampling))
    assert (output.token_ids, output.finish_reason) == ([], FinishReason.ERROR)
    assert output.error is not None
    assert output.error.kind is ErrorKind.INVALID
    assert output.error.field in sampling or output.error.field == "allowed_token_ids"
    assert output.error.text.startswith(output.error.field)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sampling", LEAVES_SOME.values(), ids=LEAVES_SOME)
def test_where_a_token_was_left_the_model_failed_and_another_engine_may_do_better(
    sampling: dict[str, Any], depth: int
) -> None:
    output = only_output(Harness(config(depth=depth)), asked(**sampling))
    assert (output.token_ids, output.finish_reason) == ([], FinishReason.ERROR)
    assert output.error is not None
    assert output.error.kind is ErrorKind.INTERNAL
    assert "no token could be drawn" in output.error.message


def test_the_kernels_mean_the_same_by_no_token() -> None:
    assert sampling.NO_TOKEN == NO_TOKEN
