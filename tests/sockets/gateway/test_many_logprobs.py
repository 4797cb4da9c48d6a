"""Answers with many log probabilities do not block the event loop while they are decoded and written."""

from __future__ import annotations

import asyncio
import gc
import itertools
import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.api.body_reader import RequestKind
from baton.cluster.gateway.api.renderer import VALUES_AT_ONCE, Text
from baton.cluster.gateway.api.response_writer import WritingTurns
from baton.cluster.wire import Codec, Outputs
from baton.engine.core.logprobs import Logprobs, TokenLogprobs
from baton.engine.core.messages import EngineOutput

from ...helpers.gateway_service import Service

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
PATIENCE_S = 100.0  # on a busy machine
USER = [{"role": "user", "content": "hello"}]


def _body_with_many_logprobs(kind: RequestKind, *, stream: bool, prompt: bool) -> tuple[str, dict[str, Any]]:
    """Return a route and a body whose answer has more values than may be written at once."""
    asked = {"model": "tiny", "temperature": 0, "stream": stream}
    if kind is RequestKind.RESPONSE:
        del asked["temperature"]
        return RESPONSES, {**asked, "input": "hello", "max_output_tokens": 150, "top_logprobs": 20}
    asked |= {"ignore_eos": True, "max_tokens": 100, "n": 2}
    if kind is RequestKind.CHAT:
        of_prompt = {"prompt_logprobs": 20} if prompt else {}
        return CHAT, {**asked, **of_prompt, "messages": USER, "logprobs": True, "top_logprobs": 20}
    of_prompt = {"echo": True} if stream else {"prompt_logprobs": 20}
    return COMPLETIONS, {**asked, **(of_prompt if prompt else {}), "prompt": [5] * 100, "logprobs": 20}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "stream", "prompt"),
    [
        *itertools.product([RequestKind.COMPLETION, RequestKind.CHAT, RequestKind.RESPONSE], [False, True], [False]),
        (RequestKind.COMPLETION, False, True),
        (RequestKind.COMPLETION, True, True),
        (RequestKind.CHAT, False, True),
    ],
)
async def test_each_turn_of_the_event_loop_unpacks_few_log_probabilities(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, kind: RequestKind, *, stream: bool, prompt: bool
) -> None:
    """With two requests at once, no turn of the event loop unpacks more than `VALUES_AT_ONCE` values."""
    service = start(Role.UNIFIED, request_timeout_s=PATIENCE_S)
    in_turn: list[int] = [0]
    real = Logprobs.entries

    def counted(logprobs: Logprobs, first: int, stop: int) -> Any:
        in_turn[-1] += (stop - first) * logprobs.width
        return real(logprobs, first, stop)

    async def count_turns() -> None:
        while True:
            await asyncio.sleep(0)
            in_turn.append(0)

    route, body = _body_with_many_logprobs(kind, stream=stream, prompt=prompt)
    monkeypatch.setattr(Logprobs, "entries", counted)
    counter = asyncio.create_task(count_turns())
    answers = await asyncio.gather(*(service.http.post(route, json=body) for _ in range(2)))
    counter.cancel()
    assert {answer.status_code for answer in answers} == {200}
    assert sum(in_turn) > 4 * VALUES_AT_ONCE
    assert max(in_turn) <= VALUES_AT_ONCE


def test_decoding_a_message_allocates_no_object_for_each_log_probability() -> None:
    """A prompt may have 2**18 log probabilities, and decoding a message blocks its thread."""
    values = [-1.0 / (1 + number) for number in range(21)]
    entries = [TokenLogprobs(list(range(at, at + 21)), values, at + 1) for at in range(4_000)]
    codec = Codec()
    output = EngineOutput(request_id="a", prompt_logprobs=Logprobs.pack(entries))
    frame = codec.encode(Outputs(1, [output]))
    gc.collect()
    before = sys.getallocatedblocks()
    message = codec.decode_from_engine(frame)
    assert sys.getallocatedblocks() - before < 100
    found = message.outputs[0].prompt_logprobs
    assert found is not None
    assert [(list(entry.token_ids), entry.rank) for entry in found] == [(e.token_ids, e.rank) for e in entries]
    assert list(found[7].logprobs) == [struct.unpack("<f", struct.pack("<f", value))[0] for value in values]


async def test_log_probabilities_of_prompts_have_a_limit(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, request_timeout_s=PATIENCE_S)
    refused = await service.complete([[5] * 200] * 2, n=64, echo=True, logprobs=20, max_tokens=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert refused.json()["error"]["code"] == "too_many_logprobs"


@pytest.mark.parametrize(
    ("route", "limit", "asked"), [(RESPONSES, "max_output_tokens", "input"), (MESSAGES, "max_tokens", "messages")]
)
async def test_a_whole_answer_without_log_probabilities_takes_few_turns_of_the_event_loop(
    service: Service, monkeypatch: pytest.MonkeyPatch, route: str, limit: str, asked: str
) -> None:
    """All long answers share these turns, and each lasts as long as the other tasks of the gateway need."""
    real, num_pieces = WritingTurns.write, []

    async def write(turns: WritingTurns, text: Text) -> list[bytes]:
        pieces = [text] if isinstance(text, bytes) else list(text)
        num_pieces.append(len(pieces))
        return await real(turns, iter(pieces))

    monkeypatch.setattr(WritingTurns, "write", write)
    body = {"model": "tiny", asked: USER, limit: 150, "ignore_eos": True, "seed": 1}
    usage = (await service.http.post(route, json=body)).json()["usage"]
    assert usage["output_tokens"] == 150
    assert len(num_pieces) == 1
    assert num_pieces[0] < 15
