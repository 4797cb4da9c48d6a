"""An HTTP load generator: sends requests, streams their answers, and measures each as `vllm bench serve` does.

It may run on the server's cores, where its own CPU time slows the server: aiohttp and msgspec keep the cost of a token
low.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
from rich.progress import Progress

from baton.cluster.cli.http_client import ANOTHERS, ModelList, no_answer
from baton.engine.core.speculation.stats import DraftCounts
from baton.engine.hf_config.errors import ModelNotFetched
from baton.engine.hf_config.hub import Files, model_folder
from baton.engine.text import Tokenizer, TokenizerError

from .figures import MeasuredRequest, summary
from .options import LoadBackend, ServeLoad
from .requests import LoadRequest, load_requests, paced

TIMEOUT_S = 600.0
READY_PERIOD_S = 1.0  # between two checks of whether the server is ready
QUOTED_CHARS = 500  # of an answer of the server that a message quotes


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int = 0


class _Part(msgspec.Struct):
    stamp: str
    part_s: float


class _Timeline(msgspec.Struct):
    parts: list[_Part]
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def opens(self) -> bool:
        """True if the delta only names the role: some servers send that before there is a token."""
        return self.role is not None and not (self.content or self.reasoning_content or self.reasoning)


class _Choice(msgspec.Struct):
    delta: _Delta | None = None  # in answers of chats


class _Event(msgspec.Struct):
    """One event of a stream, reduced to the fields that are measured."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    baton_timeline: list[_Timeline] = []
    error: Any = None


class _Traces(msgspec.Struct):
    data: list[dict[str, Any]] = []  # in Baton's answer; vLLM's is empty


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


_decode = msgspec.json.Decoder(_Event).decode


class ServerUnfit(RuntimeError):
    """The server does not answer, or lacks a feature that the measurement needs."""


def measure(load: ServeLoad) -> dict[str, Any]:
    """Run the load and return the figures; for a sweep, a list of them under `runs`.

    Raises `InvalidLoad` for options that contradict each other and for files that are no data sets, and `ServerUnfit`.
    """
    load.check()
    runs = asyncio.run(_measure(load))
    return runs[0] if load.sweeps is None else {"sweep": load.sweeps, "label": load.label, "runs": runs}


async def _measure(load: ServeLoad) -> list[dict[str, Any]]:
    headers = ({"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}) | load.extra_headers
    patience = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, ssl=not load.insecure)  # no limit: as many connections as requests
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=patience) as client:
        if load.ready_check_timeout_sec:
            await _await_ready(client, load)
        try:
            model = await _model(client, load)
            tokens = await _text_tokens(client, model, load)
            plans = []
            for number, level in enumerate(load.levels()):  # each run has other prompts, so that it hits no cache
                plans.append((level, await load_requests(dataclasses.replace(level, seed=level.seed + number), tokens)))
        except msgspec.MsgspecError as error:
            raise ServerUnfit(f"{load.server} answers, but not as OpenAI's API says ({error}): {ANOTHERS}") from error
        except aiohttp.ClientResponseError as error:
            url = error.request_info.url
            raise ServerUnfit(f"{url} answers with {error.status}, not as OpenAI's API says: {ANOTHERS}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
                raise ServerUnfit(no_answer(load.server, error.os_error)) from error
            raise ServerUnfit(f"{load.server}: {error or type(error).__name__}") from error
        return [await _run(client, model, requests, level) for level, requests in plans]


async def _run(
    client: aiohttp.ClientSession, model: str, requests: Sequence[LoadRequest], load: ServeLoad
) -> dict[str, Any]:
    """Send one run's requests, warm-ups first. Raises `ServerUnfit`."""
    for request in requests[: load.num_warmups]:
        warmup = await _ask(client, model, request, load, time.perf_counter())
        if warmup.error:
            raise ServerUnfit(f"{load.server}: the first request failed: {warmup.error}")
    if load.profile:
        await _profile(client, load, "start")
    try:
        answers, duration_s = await _send_all(client, model, requests[load.num_warmups :], load)
    finally:
        traces = await _profile(client, load, "stop") if load.profile else None
    if load.timeline and not any(answer.parts_s or answer.error for answer in answers):
        raise ServerUnfit(f"{load.server} does not say how requests spend their time: leave --timeline out")
    return summary(load, model, answers, duration_s) | ({} if traces is None else {"traces": traces})


async def _await_ready(client: aiohttp.ClientSession, load: ServeLoad) -> None:
    """Wait until a short request is answered. Raises `ServerUnfit` if that takes too long."""
    began_s = time.perf_counter()
    while True:
        try:
            model = await _model(client, load)
            fault = (await _ask(client, model, LoadRequest("Hello", 1), load, began_s)).error
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            fault = str(error) or type(error).__name__
        if not fault:
            return
        if time.perf_counter() - began_s > load.ready_check_timeout_sec:
            raise ServerUnfit(f"{load.server} was not ready after {load.ready_check_timeout_sec:g} s: {fault}")
        await asyncio.sleep(READY_PERIOD_S)


async def _profile(client: aiohttp.ClientSession, load: ServeLoad, what: str) -> list[dict[str, Any]]:
    """Start or stop the profiler of the server's engines, and return the written traces. Raises `ServerUnfit`."""
    try:
        async with client.post(load.at(f"/{what}_profile")) as answer:
            body = await answer.read()
            if not answer.ok:
                raise ServerUnfit(f"--profile: {load.server} says {answer.status}: {body.decode(errors='replace')}")
            return msgspec.json.decode(body, type=_Traces).data if body else []
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        raise ServerUnfit(f"--profile: {load.server}: {error or type(error).__name__}") from error


async def _model(client: aiohttp.ClientSession, load: ServeLoad) -> str:
    if name := load.served_model_name or load.model:
        return name
    async with client.get(load.at("/v1/models")) as response:
        _check_key(response, load)
        response.raise_for_status()
        return msgspec.json.decode(await response.read(), type=ModelList).data[0].id


def _check_key(answer: aiohttp.ClientResponse, load: ServeLoad) -> None:
    if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise ServerUnfit(f"{load.server} answers with status {answer.status}: give a key that it takes as --api-key")


async def _text_tokens(client: aiohttp.ClientSession, model: str, load: ServeLoad) -> _LocalTokens | _ServersTokens:
    if load.tokenizer is None:
        return _ServersTokens(client, model, load)
    try:
        folder = await asyncio.to_thread(model_folder, load.tokenizer, Files.TEXT)
        return _LocalTokens(Tokenizer.from_folder(folder))
    except (TokenizerError, ModelNotFetched) as error:
        raise ServerUnfit(f"--tokenizer: {error}") from error


class _LocalTokens:
    """Implements `TextTokens` with the tokenizer of a model's folder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    async def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, False)


class _ServersTokens:
    """Implements `TextTokens` with the server's routes. Raises `ServerUnfit` if it has none."""

    def __init__(self, client: aiohttp.ClientSession, model: str, load: ServeLoad) -> None:
        self._client, self._model, self._load = client, model, load

    async def encode(self, text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        return msgspec.json.decode(await self._post("/tokenize", body), type=_Tokens).tokens

    async def decode(self, tokens: list[int]) -> str:
        return msgspec.json.decode(await self._post("/detokenize", {"tokens": tokens}), type=_Text).prompt

    async def _post(self, route: str, body: dict[str, Any]) -> bytes:
        url = self._load.server
        async with self._client.post(self._load.at(route), json={"model": self._model, **body}) as answer:
            _check_key(answer, self._load)
            if 400 <= answer.status < 500:
                quoted = (await answer.text())[:QUOTED_CHARS]
                raise ServerUnfit(
                    f"{url} answers {route} with status {answer.status}: {quoted}\n"
                    "If it has no such route, name the model with --tokenizer"
                )
            answer.raise_for_status()
            return await answer.read()


async def _send_all(
    client: aiohttp.ClientSession, model: str, requests: Sequence[LoadRequest], load: ServeLoad
) -> tuple[list[MeasuredRequest], float]:
    gate = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else nullcontext()
    with Progress(transient=True, disable=load.disable_tqdm) as bar:
        task = bar.add_task("requests", total=len(requests))

        async def one(number: int, request: LoadRequest) -> MeasuredRequest:
            async with gate:
                answer = await _ask(client, model, request, load, start_s, number)
            bar.advance(task)
            return answer

        start_s = time.perf_counter()
        running: list[asyncio.Task[MeasuredRequest]] = []
        async for request in paced(load, requests):
            running.append(asyncio.create_task(one(len(running), request)))
        answers = await asyncio.gather(*running)
    return list(answers), time.perf_counter() - start_s


def _body(model: str, request: LoadRequest, load: ServeLoad) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.output_tokens,
        "temperature": load.temperature,
        "ignore_eos": load.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    names = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
    body |= {name: value for name in names if (value := getattr(load, name)) is not None}
    if load.backend is LoadBackend.OPENAI_CHAT:
        body["messages"] = [{"role": "user", "content": request.prompt}]
        if request.prediction is not None:
            body["prediction"] = {"type": "content", "content": request.prediction}
        if variables := load.template_variables:
            body["chat_template_kwargs"] = variables
        if load.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": load.logprobs}
    else:
        body["prompt"] = request.prompt
        if load.logprobs is not None:
            body["logprobs"] = load.logprobs
    if load.timeline:
        body["baton_timeline"] = True
    return body | load.extra_fields


async def _ask(
    client: aiohttp.ClientSession,
    model: str,
    request: LoadRequest,
    load: ServeLoad,
    began_s: float,
    number: int | None = None,
) -> MeasuredRequest:
    """Send one request of a run that began at `began_s`, and measure its answer. Warm-ups have no `number`."""
    body = _body(model, request, load)
    is_named = load.request_id_prefix is not None and number is not None
    headers = {"x-request-id": f"{load.request_id_prefix}{number}"} if is_named else None
    answer = MeasuredRequest(input_tokens=len(request.prompt) if isinstance(request.prompt, list) else 0)
    start_s = time.perf_counter()
    answer.start_s = start_s - began_s
    try:
        async with client.post(load.at(load.route), json=body, headers=headers) as response:
            if response.ok:
                await _measure_answer(response.content, answer, start_s)
            else:
                answer.error = (await response.read()).decode(errors="replace")
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _measure_answer(content: aiohttp.StreamReader, answer: MeasuredRequest, start_s: float) -> None:
    """Read a stream to its end, or to an error event, and note its figures. The request was sent at `start_s`."""
    last_s = start_s
    async for event in _events(content):
        if event.error is not None:
            answer.error = str(event.error)
            return
        now_s = time.perf_counter()
        if event.choices and not all(each.delta is not None and each.delta.opens for each in event.choices):
            if answer.ttft_s:
                answer.itl_s.append(now_s - last_s)
            else:
                answer.ttft_s = now_s - start_s
            answer.latency_s = now_s - start_s
            last_s = now_s
        if event.usage is not None:
            answer.output_tokens = event.usage.completion_tokens
            answer.input_tokens = event.usage.prompt_tokens or answer.input_tokens
        for timeline in event.baton_timeline:
            _note_timeline(timeline, answer)


def _note_timeline(timeline: _Timeline, answer: MeasuredRequest) -> None:
    for part in timeline.parts:
        answer.parts_s[part.stamp] = answer.parts_s.get(part.stamp, 0.0) + part.part_s
    answer.drafts += DraftCounts(timeline.num_drafts, timeline.num_draft_tokens, timeline.num_accepted_tokens)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[_Event]:
    """Yield the server-sent events of a stream. Raises `MsgspecError` for content that is no event."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data: ").rstrip(b"\r")
            if len(data) < len(line.rstrip(b"\r")) and data != b"[DONE]":
                yield _decode(data)
