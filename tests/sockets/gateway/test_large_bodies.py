"""Large bodies are parsed in separate processes, with the same result, and their cost does not delay the gateway."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.api import body_service
from baton.cluster.gateway.api.body_reader import BodyReader, RequestKind
from baton.cluster.gateway.api.body_service import BodyService
from baton.cluster.gateway.api.job import PreparedRequest
from baton.cluster.gateway.api.prepare import INLINE_MESSAGES
from baton.cluster.gateway.api.streams import merge_streams
from baton.cluster.gateway.bodies import process_pool
from baton.cluster.gateway.bodies.body import INLINE_BYTES, PIECE_BYTES, Body
from baton.cluster.gateway.bodies.process_pool import HEAVY_BYTES, SmallestFirstQueue
from baton.cluster.gateway.model import ServedModel
from baton.cluster.gateway.routing import prefix_index
from baton.cluster.gateway.settings import GatewaySettings
from baton.engine.text import ChatTemplate, Tokenizer

from ...helpers.gateway_service import Service, until
from ...helpers.tiny_model import tiny_model, tiny_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATIENCE_S = 100.0  # starting a process takes seconds, on a busy machine tens of seconds
PAD = {"user": "u" * INLINE_BYTES}  # makes any body a large one
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
MANY = [{"role": "user", "content": "x"}] * (INLINE_MESSAGES + 1)

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
USER = [{"role": "user", "content": "hello"}]
REQUESTS: list[tuple[RequestKind, dict[str, Any]]] = [
    (RequestKind.COMPLETION, {"prompt": "the quick brown fox"}),
    (RequestKind.COMPLETION, {"prompt": [5] * 100, "echo": True, "logprobs": 1, "max_tokens": 0}),
    (
        RequestKind.COMPLETION,
        {"prompt": [[5, 6], [7] * 40], "n": 3, "seed": -5, "stop": ["a", "b"], "logit_bias": {"5": 1}},
    ),
    (RequestKind.COMPLETION, {"prompt": "x", "structured_outputs": {"choice": ["a", "b"]}, "bad_words": ["fox"]}),
    (
        RequestKind.COMPLETION,
        {"prompt": "x", "stream": True, "stream_options": {"include_usage": True, "resumable": True}},
    ),
    (RequestKind.CHAT, {"messages": USER, "chat_template_kwargs": {"hint": "so"}, "cache_salt": "s", "priority": 3}),
    (RequestKind.CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "required", "baton_timeline": True}),
    (
        RequestKind.RESPONSE,
        {
            "input": "hello",
            "instructions": "be",
            "metadata": {"a": "b"},
            "tools": [TOOL["function"] | {"type": "function"}],
        },
    ),
    (
        RequestKind.MESSAGES,
        {
            "messages": USER,
            "max_tokens": 5,
            "system": "be",
            "stop_sequences": ["a"],
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any"},
        },
    ),
]
PADS = {RequestKind.MESSAGES: {"cache_control": PAD}}  # a field of any size without effect


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "fields"), REQUESTS, ids=lambda value: str(value)[:60])
async def test_a_separate_process_parses_a_body_like_the_gateways_own(
    start: Callable[..., Service], thinker: ServedModel, kind: RequestKind, fields: dict[str, Any]
) -> None:
    service = start(Role.UNIFIED, request_timeout_s=PATIENCE_S, served=thinker)
    text = json.dumps({"model": thinker.model_id, **fields, **PADS.get(kind, PAD)}).encode()
    expected = await BodyReader(thinker, GatewaySettings(), in_event_loop=False).prepare(kind, text, "circle")
    found = await _read_elsewhere(service.bodies, kind, text)
    assert found == expected
    assert found.prompts == expected.prompts
    assert (await service.metrics())['baton_large_bodies_total{outcome="read"}'] == 1


@pytest.mark.slow
async def test_a_large_chat_is_answered(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, request_timeout_s=PATIENCE_S)
    whole = await service.chat("hello", max_tokens=4, seed=1)
    large = await service.chat("hello", max_tokens=4, seed=1, **PAD)
    assert large.json()["choices"] == whole.json()["choices"]
    assert (await service.metrics())['baton_large_bodies_total{outcome="read"}'] == 1


@pytest.mark.slow
async def test_integers_of_more_than_64_bits_pass_from_one_process_to_the_other(
    start: Callable[..., Service], thinker: ServedModel
) -> None:
    service = start(Role.UNIFIED, request_timeout_s=PATIENCE_S, served=thinker)
    schema = {"type": "object", "properties": {"at": {"type": "number", "maximum": 10**30}}}
    tools = [{"type": "function", "name": "look", "parameters": schema}]
    fields = {"input": "hello", "tools": tools, "max_tool_calls": 2**65, "seed": 1, "max_output_tokens": 4, **PAD}
    answer = (await service.http.post("/v1/responses", json={"model": thinker.model_id, **fields})).json()
    assert (answer["tools"][0]["parameters"], answer["max_tool_calls"]) == (schema, 2**65), answer
    assert (await service.metrics())['baton_large_bodies_total{outcome="broken"}'] == 0


@pytest.mark.slow
async def test_a_chat_of_many_small_messages_is_rendered_in_another_process(start: Callable[..., Service]) -> None:
    """The time of a template may be quadratic in the number of messages."""
    service = start(Role.UNIFIED, request_timeout_s=PATIENCE_S, served=tiny_model(_tokenizer_of(PLAIN_TEMPLATE), 4096))
    response = await service.http.post(CHAT, json={"model": "tiny", "messages": MANY, "max_tokens": 1})
    assert response.status_code == 200, response.text
    assert (await service.metrics())['baton_large_bodies_total{outcome="read"}'] == 1


async def test_small_bodies_are_parsed_in_the_gateways_process(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, request_timeout_s=PATIENCE_S)
    assert (await service.chat("hello", max_tokens=1, tools=[])).status_code == 200
    samples = await service.metrics()
    assert sum(value for name, value in samples.items() if name.startswith("baton_large_bodies_total")) == 0


@pytest.mark.slow
async def test_the_refusal_of_a_large_body_equals_that_of_a_small_one(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, request_timeout_s=PATIENCE_S)
    refusals = [await service.complete("hello", temperature=-1), await service.complete("hello", temperature=-1, **PAD)]
    assert refusals[0].json() == refusals[1].json()
    assert refusals[1].status_code == 400
    assert (await service.metrics())['baton_large_bodies_total{outcome="refused"}'] == 1


@pytest.mark.slow
async def test_token_routes_answer_large_bodies(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, request_timeout_s=PATIENCE_S)
    text = "the fox " * 10_000
    told = (await service.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    back = await service.http.post("/detokenize", json={"tokens": told["tokens"]})
    assert back.json() == {"prompt": text}
    assert (await service.metrics())["baton_request_memory_bytes"] == 0


@pytest.mark.slow
async def test_an_endless_template_is_ended_and_delays_no_other_request(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "TIMEOUT_S", 1)
    endless = (
        "{% if messages | length > 64 %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        "{% endif %}{{ messages[0].content }}"
    )
    service = start(Role.UNIFIED, request_timeout_s=PATIENCE_S, served=tiny_model(_tokenizer_of(endless)))
    attack = asyncio.create_task(service.http.post(CHAT, json={"model": "tiny", "messages": MANY}))
    answered = 0
    while not attack.done():
        assert (await service.chat("hello", max_tokens=1)).status_code == 200
        answered += 1
    assert (await attack).status_code == 400
    assert (await attack).json()["error"]["code"] == "body_too_expensive"
    assert answered > 1
    assert (await service.chat("hello", max_tokens=1, **PAD)).status_code == 200  # a new process reads it
    samples = await service.metrics()
    assert samples['baton_large_bodies_total{outcome="too_slow"}'] == 1
    assert samples['baton_large_bodies_total{outcome="read"}'] == 1


@pytest.mark.slow
async def test_a_body_that_takes_too_much_memory_is_refused(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "MEMORY_BYTES", 16 << 20)
    service = start(Role.UNIFIED, request_timeout_s=PATIENCE_S)
    response = await service.complete("hello", user="\u4e2d" * 4_000_000)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "body_too_expensive"
    assert (await service.complete("hello", max_tokens=1, **PAD)).status_code == 200


@pytest.mark.slow
async def test_a_process_that_dies_is_replaced(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, request_timeout_s=PATIENCE_S)
    assert (await service.complete("hello", max_tokens=1, **PAD)).status_code == 200
    (pid,) = service.bodies.processes.pids
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert (await service.complete("hello", max_tokens=1, **PAD)).status_code == 200


async def test_a_process_that_dies_while_idle_is_replaced_before_the_next_body_and_leaves_no_zombie(
    start: Callable[..., Service],
) -> None:
    service = start(Role.UNIFIED, body_processes=1, request_timeout_s=PATIENCE_S)
    pool = service.bodies.processes
    for _ in range(2):
        assert (await service.complete("hello", max_tokens=1, **PAD)).status_code == 200
        (before,) = pool.pids
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while pool.pids in ([], [before]):
                await asyncio.sleep(0.02)
        assert not os.path.exists(f"/proc/{before}")


@pytest.mark.slow
async def test_no_body_waits_for_a_process_that_starts_while_another_is_idle(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting a process takes a second or two; here the second process never starts."""
    popen, started = subprocess.Popen, []

    def open_slowly(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(["sleep", "600"] if started else command, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", open_slowly)
    service = start(Role.UNIFIED, body_processes=2, request_timeout_s=PATIENCE_S)
    await service.bodies.processes.start()
    answers = await asyncio.gather(*(service.complete("hello", max_tokens=1, **PAD) for _ in range(3)))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [process.poll() for process in started] == [None, None]


@pytest.mark.slow
async def test_a_disconnect_releases_the_memory_of_the_body(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, body_processes=1, request_timeout_s=PATIENCE_S)
    await service.bodies.processes.start()
    (pid,) = service.bodies.processes.pids
    os.kill(pid, signal.SIGSTOP)
    request = asyncio.create_task(service.complete("hello", **PAD))
    await until(lambda: service.bodies.budget.held_bytes > INLINE_BYTES)
    request.cancel()
    await until(lambda: service.bodies.budget.held_bytes == 0)
    os.kill(pid, signal.SIGCONT)
    assert (await service.complete("hello", max_tokens=1, **PAD)).status_code == 200


@pytest.mark.slow
async def test_the_number_of_waiting_large_bodies_is_limited(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "MAX_WAITING", 2)
    service = start(Role.UNIFIED, body_processes=1, request_timeout_s=PATIENCE_S)
    await service.bodies.processes.start()
    (pid,) = service.bodies.processes.pids
    os.kill(pid, signal.SIGSTOP)
    waiting = [
        asyncio.create_task(service.complete("hello", max_tokens=1, **PAD)) for _ in range(3)
    ]  # the process has one of them
    await until(lambda: service.bodies.processes.num_waiting == 2)
    refused = await service.complete("hello", max_tokens=1, **PAD)
    os.kill(pid, signal.SIGCONT)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "readers_full"
    assert int(refused.headers["retry-after"]) >= 1
    assert [(await each).status_code for each in waiting] == [200] * 3


@pytest.mark.slow
async def test_a_million_tokens_are_unpacked_in_pieces(monkeypatch: pytest.MonkeyPatch, model: ServedModel) -> None:
    """The tokens are unpacked in pieces, so that other tasks of the event loop run in between."""
    sizes: list[int] = []
    real = body_service.unpack_tokens
    monkeypatch.setattr(body_service, "unpack_tokens", lambda packed: sizes.append(len(packed)) or real(packed))
    long = ServedModel("tiny", model.tokenizer, 2**20, model.vocab_size)
    bodies = BodyService(long, GatewaySettings(), _NoMetrics())
    try:
        prompt = [7] * 1_000_000
        text = json.dumps({"model": "tiny", "prompt": prompt}).encode()
        assert (await _read_elsewhere(bodies, RequestKind.COMPLETION, text)).prompts == [prompt]
    finally:
        bodies.processes.close()
    assert max(sizes) <= 4 * body_service.TOKENS_AT_ONCE
    assert sum(sizes) == 4 * (len(prompt) + 1)


async def test_the_choices_of_a_prompt_share_its_block_hashes(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing a long prompt takes milliseconds, and one request may have 256 choices."""
    service = start(Role.UNIFIED, request_timeout_s=PATIENCE_S)
    hashed = 0
    real = prefix_index.block_hashes

    def counted(*args: Any) -> Any:
        nonlocal hashed
        hashed += 1
        return real(*args)

    monkeypatch.setattr(prefix_index, "block_hashes", counted)
    assert (await service.complete([5] * 200, n=16, max_tokens=1)).status_code == 200
    assert hashed == 1


async def test_the_smallest_waiting_body_is_next_and_large_ones_leave_a_process_free() -> None:
    queue = SmallestFirstQueue(2)
    heavy = HEAVY_BYTES + 1
    assert await queue.take(heavy) == 1
    waiting = {size: asyncio.create_task(queue.take(size)) for size in (heavy + 1, 500, 300)}
    await asyncio.sleep(0)
    assert queue.num_waiting == 2  # the small body that arrived first has the remaining process
    assert await waiting[500] == 0
    queue.put_back(0, 500)
    assert await waiting[300] == 0
    queue.put_back(0, 300)
    await asyncio.sleep(0)
    assert not waiting[heavy + 1].done()
    gone = asyncio.create_task(queue.take(heavy))
    await asyncio.sleep(0)
    gone.cancel()
    queue.put_back(1, heavy)
    assert await waiting[heavy + 1] == 1
    assert await queue.take(5) == 0


async def test_between_the_starts_of_two_choices_other_tasks_run() -> None:
    """The first step of a choice sends its prompt, which may be long."""
    order: list[str] = []

    async def choice(number: int) -> AsyncGenerator[str, None]:
        order.append(f"choice {number}")
        yield "token"

    async def other_client() -> None:
        while sum(what != "other" for what in order) < 4:
            order.append("other")
            await asyncio.sleep(0)

    other = asyncio.create_task(other_client())
    async with aclosing(merge_streams([choice(number) for number in range(4)])) as merged:
        async for _ in merged:
            pass
    await other
    begun = [index for index, what in enumerate(order) if what.startswith("choice")]
    assert len(begun) == 4
    assert all("other" in order[first:second] for first, second in itertools.pairwise(begun))


@pytest.mark.slow
async def test_a_long_answer_to_tokenize_is_written_in_pieces(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, request_timeout_s=PATIENCE_S)
    content = json.dumps({"prompt": "the fox " * 20_000}).encode()
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": content, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    await service.app({"type": "http", "method": "POST", "path": "/tokenize", "headers": headers}, receive, send)
    pieces = [message["body"] for message in sent if message["type"] == "http.response.body"]
    assert len(pieces) > 2
    assert max(map(len, pieces)) <= PIECE_BYTES
    told = json.loads(b"".join(pieces))
    assert told["count"] == len(told["tokens"])
    assert dict(sent[0]["headers"])[b"content-length"] == str(sum(map(len, pieces))).encode()
    assert service.bodies.budget.held_bytes == 0


async def _read_elsewhere(bodies: BodyService, kind: RequestKind, text: bytes) -> PreparedRequest:
    with Body() as body:
        await body.add(text)
        body.file()
        with bodies.budget.reservation() as held:
            return await bodies.prepare(kind, body, "circle", held)


class _NoMetrics:
    def count_body(self, outcome: str) -> None: ...

    def watch_memory(self, held_bytes: Callable[[], float]) -> None: ...


def _tokenizer_of(template: str) -> Tokenizer:
    tokenizer = tiny_tokenizer()
    return Tokenizer(tokenizer.backend, tokenizer.special_tokens, ChatTemplate({"default": template}))
