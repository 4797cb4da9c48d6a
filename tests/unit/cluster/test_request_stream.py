"""A request's stream joins its waiting outputs if a single step could have produced them."""

from __future__ import annotations

from typing import Any

import pytest

from baton.cluster.contracts import EngineGone
from baton.cluster.engine_connection import RequestStream
from baton.engine.core.logprobs import Logprobs
from baton.engine.core.messages import EngineError, EngineOutput, ErrorKind, FinishReason, KVSource
from baton.engine.core.speculation.stats import DraftCounts
from baton.engine.core.stages import Stage

LOGPROBS = Logprobs(1, b"\0" * 4, b"\0" * 4, b"\0" * 4)
LAST: dict[str, Any] = {"finish_reason": FinishReason.STOP, "stop_token_id": 9}


def output(*token_ids: int, **fields: Any) -> EngineOutput:
    return EngineOutput(request_id="a", generation=2, token_ids=list(token_ids), **fields)


async def taken(*outputs: EngineOutput) -> list[EngineOutput]:
    """Return the outputs that a stream yields when all of `outputs` wait in it."""
    stream = RequestStream(lambda: None)
    for each in outputs:
        stream.put(each)
    return [each async for each in stream]


async def test_waiting_tokens_are_joined_with_the_fields_of_the_first_and_the_last_output() -> None:
    first = output(1, num_cached_tokens=16, ages={Stage.STARTED: 0.5})
    joined = output(1, 2, 3, 9, num_cached_tokens=16, ages={Stage.STARTED: 0.5}, **LAST)
    assert await taken(first, output(2), output(3), output(9, **LAST)) == [joined]


async def test_one_output_is_yielded_as_it_came() -> None:
    stream = RequestStream(lambda: None)
    for each in (output(1), output(2, 3), output(9, **LAST)):
        stream.put(each)
        assert await anext(stream) is each
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize(
    "apart",
    [
        output(2, logprobs=LOGPROBS),
        output(2, prompt_logprobs=LOGPROBS),
        output(2, drafts=DraftCounts(1, 2, 0)),
        output(2, kv_source=KVSource(ticket=b"t", num_tokens=1)),
        output(kv_source=KVSource(ticket=b"t", num_tokens=1)),
    ],
)
async def test_outputs_with_fields_of_one_step_are_not_joined(apart: EngineOutput) -> None:
    last = output(3, **LAST)
    assert await taken(output(1), apart, last) == [output(1), apart, last]


@pytest.mark.parametrize("fields", [{"ages": {Stage.STARTED: 0.5}}, {"num_cached_tokens": 16}])
async def test_fields_of_a_first_output_are_not_joined_to_earlier_tokens(fields: dict[str, Any]) -> None:
    assert await taken(output(1), output(2, **fields), output(3, **LAST)) == [output(1), output(2, 3, **fields, **LAST)]


async def test_errors_and_lost_engines_come_after_the_tokens_before_them() -> None:
    failed = output(finish_reason=FinishReason.ERROR, error=EngineError(ErrorKind.INTERNAL, "it broke"))
    assert await taken(output(1), output(2), failed) == [output(1, 2), failed]
    stream = RequestStream(lambda: None)
    for each in (output(1), output(2)):
        stream.put(each)
    stream.end(EngineGone("it is gone"))
    assert await anext(stream) == output(1, 2)
    with pytest.raises(EngineGone, match="it is gone"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_closing_a_stream_before_its_last_output_was_read_aborts_the_request() -> None:
    for outputs, aborts in (([output(1), output(2)], 1), ([output(1), output(2, **LAST)], 0)):
        aborted: list[bool] = []
        stream = RequestStream(lambda aborted=aborted: aborted.append(True))  # type: ignore[misc]
        for each in outputs:
            stream.put(each)
        await anext(stream)
        await stream.aclose()
        assert len(aborted) == aborts
