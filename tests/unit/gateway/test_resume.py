"""Resumption: a stream that breaks at any event continues at another gateway, which knows nothing of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.api.detokenize import ChoicePosition
from baton.cluster.gateway.api.resume import ReplayFilter, StreamPosition
from baton.engine.core.logprobs import Logprobs, TokenLogprobs
from baton.engine.core.messages import EngineOutput, FinishReason

from ...helpers.gateway_service import Service

PROMPT = list(range(20, 60))
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"resumable": True}}
LENGTH: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True}
ASKED: dict[str, dict[str, Any]] = {
    "without a seed": {"temperature": 0.9},
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "logprobs": {"logprobs": 3},
    "several choices": {"n": 3},
    "echo": {"echo": True},
    "token ids": {"return_token_ids": True},
    "usage": {"stream_options": {"resumable": True, "include_usage": True, "continuous_usage_stats": True}},
}


@dataclass(frozen=True)
class Event:
    id: str | None
    data: Any


def events_of(response: httpx.Response) -> list[Event]:
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"])
        found.append(Event(lines.get("id"), data))
    assert found[-1] == Event(None, "[DONE]")
    return found


async def resumed(service: Service, event_id: str | None, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {} if event_id is None else {"last-event-id": event_id}
    return await service.http.post(path, json={"model": "tiny", **body}, headers=headers)


def by_choice(events: list[Event]) -> list[Any]:
    """Return the events by choice, since their order between choices may differ, without counts of cached tokens."""
    for event in events[:-1]:
        if event.data.get("usage"):
            event.data["usage"].pop("prompt_tokens_details", None)
    return sorted((event.data for event in events[:-1]), key=lambda data: [part["index"] for part in data["choices"]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("roles", [[Role.UNIFIED], [Role.PREFILL, Role.DECODE]], ids=["unified", "disaggregated"])
async def test_another_gateway_sends_the_events_after_any_event(
    start: Callable[..., Service], roles: list[Role], asked: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, **LENGTH, **STREAM, **asked}
    first, second = start(Role.UNIFIED), start(*roles)
    whole = events_of(await resumed(first, None, "/v1/completions", body))
    named = [number for number, event in enumerate(whole) if event.id is not None]
    for number in named:
        rest = events_of(await resumed(second, whole[number].id, "/v1/completions", body))
        assert by_choice(whole[: number + 1] + rest) == by_choice(whole)
        assert {event.id for event in rest} <= {event.id for event in whole[number + 1 :]} or asked.get("n")
    assert (await second.metrics())["baton_streams_resumed_total"] == len(named) > 4


async def test_a_resumed_chat_does_not_repeat_the_role(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED)
    service.script_chat("Hello?", "äöü and a stop string that begins, st, and stops: stop")
    messages = [{"role": "user", "content": "Hello?"}]
    body = {"messages": messages, "stop": ["stop "], **STREAM}
    whole = events_of(await resumed(service, None, "/v1/chat/completions", body))
    told = [event.id for event in whole]
    for number, event in enumerate(whole):
        if event.id is not None:
            rest = events_of(await resumed(service, event.id, "/v1/chat/completions", body))
            assert rest == whole[number + 1 :]
    assert told[0] is None  # the role chunk has no id: a client that has no other starts anew


async def test_tokens_that_differ_from_those_sent_are_a_conflict_before_the_first_event(
    start: Callable[..., Service],
) -> None:
    body = {"prompt": PROMPT, **LENGTH, **STREAM}
    first, second = start(Role.UNIFIED), start(Role.UNIFIED)
    whole = events_of(await resumed(first, None, "/v1/completions", body))
    second.cluster.scripts[tuple(PROMPT)] = [77] * 10
    answer = await resumed(second, whole[3].id, "/v1/completions", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "stream_diverged")
    second.cluster.scripts[tuple(PROMPT)] = []
    await second.cluster.settled()


async def test_events_have_ids_only_on_request(start: Callable[..., Service]) -> None:
    plain = await start(Role.UNIFIED).complete(PROMPT, **LENGTH, stream=True)
    assert {event.id for event in events_of(plain)} == {None}


@pytest.mark.parametrize(
    ("event_id", "fields", "code"),
    [
        ("1.nonsense", STREAM, "invalid_event_id"),
        ("", STREAM, "invalid_event_id"),
        ("2.", STREAM, "invalid_event_id"),
        (
            StreamPosition("id", 0, 1, (ChoicePosition(), ChoicePosition())).encode().decode(),
            STREAM,
            "invalid_event_id",
        ),
        (StreamPosition("no name", 0, 1, (ChoicePosition(),)).encode().decode(), STREAM, "invalid_event_id"),
        (StreamPosition("id", 0, -1, (ChoicePosition(),)).encode().decode(), STREAM, "invalid_event_id"),
        (StreamPosition("id", 0, 1, (ChoicePosition(-1),)).encode().decode(), STREAM, "invalid_event_id"),
        (StreamPosition("id", 0, 1, (ChoicePosition(),)).encode().decode(), {"stream": True}, "not_resumable"),
    ],
)
async def test_an_event_id_of_no_position_of_this_request_is_refused(
    start: Callable[..., Service], event_id: str, fields: dict[str, Any], code: str
) -> None:
    answer = await resumed(start(Role.UNIFIED), event_id, "/v1/completions", {"prompt": PROMPT, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, "last-event-id")


def test_an_output_is_split_into_its_tokens() -> None:
    def output(tokens: list[int], **fields: Any) -> EngineOutput:
        logprobs = Logprobs.pack([TokenLogprobs([token], [-1.0], 1) for token in tokens])
        return EngineOutput(request_id="", token_ids=tokens, logprobs=logprobs, **fields)

    last = {"finish_reason": FinishReason.STOP, "stop_token_id": 5}
    first, second, third = ReplayFilter(ChoicePosition()).split(output([3, 4, 5], num_cached_tokens=9, **last))
    assert first == output([3], num_cached_tokens=9)
    assert second == output([4])
    assert third == output([5], **last)
    whole = output([5], num_cached_tokens=9, **last)
    assert ReplayFilter(ChoicePosition()).split(whole) == [whole]


def test_a_checksum_does_not_depend_on_how_the_tokens_are_split() -> None:
    whole = ChoicePosition().after([1, 2**32 - 1, 3], is_whole=True)
    assert ChoicePosition().after([1], is_whole=False).after([2**32 - 1, 3], is_whole=True) == whole
    assert ChoicePosition().after([1, 3, 2**32 - 1], is_whole=True) != whole
