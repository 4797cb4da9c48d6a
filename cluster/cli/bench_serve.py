"""An HTTP load generator: streaming completions of random prompts, measured as `vllm bench serve` measures.

ttft    first token after the request was sent
itl     between one event with tokens and the next: a step may bring several
tpot    (end - first token) / (output tokens - 1)

It may share the server's cores, so that its own time counts: aiohttp and msgspec keep the cost of a token low.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from rich.progress import Progress

from baton.engine.core.speculation.stats import NO_DRAFTS, DraftCounts, SpeculationStats
from baton.engine.hf_config.errors import ModelNotFetched
from baton.engine.hf_config.hub import Files, model_folder
from baton.engine.text import Tokenizer, TokenizerError

from .http_client import ModelList
from .options import ServeLoad

ALPHABET = " abcdefghijklmnopqrstuvwxyz0123456789"
PERCENTILES = (50, 90, 95, 99)
TIMEOUT_S = 600.0


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Part(msgspec.Struct):
    stamp: str
    part_s: float


class _Timeline(msgspec.Struct):
    parts: list[_Part]
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class _Event(msgspec.Struct):
    """One event of a stream, with the fields that are measured."""

    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    baton_timeline: list[_Timeline] = []
    error: Any = None


class _Tokens(msgspec.Struct):
    tokens: list[int]


_decode = msgspec.json.Decoder(_Event).decode


class ServerUnfit(RuntimeError):
    """The server does not answer, or lacks a feature that the measurement needs."""


@dataclass
class MeasuredRequest:
    """A request as its client measured it, in seconds."""

    ttft_s: float = 0.0
    latency_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    parts_s: dict[str, float] = field(default_factory=dict)  # by stamp, from the server's timeline
    drafts: DraftCounts = NO_DRAFTS  # that engines checked for it, from the timeline
    error: str = ""


def measure(load: ServeLoad) -> dict[str, Any]:
    """Run the load and return the figures. Raises `ServerUnfit`."""
    return asyncio.run(_measure(load))


async def _measure(load: ServeLoad) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    patience = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)  # as many as there are requests
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=patience) as client:
        try:
            model = load.model or await _only_model(client, load)
            prompts = _prompts(await _plain_tokens(client, model, load), load)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            raise ServerUnfit(f"{load.url}: {error or type(error).__name__}") from error
        for prompt in prompts[: load.num_warmups]:
            warmup = await _ask(client, model, prompt, load)
            if warmup.error:
                raise ServerUnfit(f"{load.url}: the first request failed: {warmup.error}")
        answers, duration_s = await _send_all(client, model, prompts[load.num_warmups :], load)
    if load.timeline and not any(answer.parts_s or answer.error for answer in answers):
        raise ServerUnfit(f"{load.url} does not say where its time goes: leave --timeline out")
    return summary(load, model, answers, duration_s)


async def _only_model(client: aiohttp.ClientSession, load: ServeLoad) -> str:
    async with client.get(load.at("/v1/models"), raise_for_status=True) as response:
        return msgspec.json.decode(await response.read(), type=ModelList).data[0].id


async def _plain_tokens(client: aiohttp.ClientSession, model: str, load: ServeLoad) -> list[int]:
    """Return the tokens of some plain text, of which random prompts are made."""
    if load.tokenizer is not None:
        try:
            folder = await asyncio.to_thread(model_folder, load.tokenizer, Files.TEXT)
            return Tokenizer.from_folder(folder).encode(ALPHABET, add_special_tokens=False)
        except (TokenizerError, ModelNotFetched) as error:
            raise ServerUnfit(f"--tokenizer: {error}") from error
    body = {"model": model, "prompt": ALPHABET, "add_special_tokens": False}
    async with client.post(load.at("/tokenize"), json=body) as answer:
        if 400 <= answer.status < 500:
            raise ServerUnfit(
                f"{load.url} has no /tokenize (status {answer.status}): name the model's folder with --tokenizer"
            )
        answer.raise_for_status()
        return msgspec.json.decode(await answer.read(), type=_Tokens).tokens


def _prompts(tokens: Sequence[int], load: ServeLoad) -> list[list[int]]:
    rng = random.Random(load.seed)
    return [rng.choices(tokens, k=load.input_len) for _ in range(load.num_warmups + load.num_prompts)]


async def _send_all(
    client: aiohttp.ClientSession, model: str, prompts: Sequence[list[int]], load: ServeLoad
) -> tuple[list[MeasuredRequest], float]:
    gate = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else nullcontext()
    with Progress(transient=True) as bar:
        task = bar.add_task("requests", total=len(prompts))

        async def one(prompt: list[int]) -> MeasuredRequest:
            async with gate:
                answer = await _ask(client, model, prompt, load)
            bar.advance(task)
            return answer

        start_s = time.perf_counter()
        running = [asyncio.create_task(one(prompt)) async for prompt in _paced(prompts, load)]
        answers = await asyncio.gather(*running)
    return list(answers), time.perf_counter() - start_s


async def _paced(prompts: Sequence[list[int]], load: ServeLoad) -> AsyncIterator[list[int]]:
    """Yield the prompts as a Poisson process of `request_rate` requests a second."""
    rng = random.Random(load.seed + 1)
    due_s = time.perf_counter()
    for prompt in prompts:
        yield prompt
        if load.request_rate:
            due_s += rng.expovariate(load.request_rate)
            await asyncio.sleep(due_s - time.perf_counter())


async def _ask(client: aiohttp.ClientSession, model: str, prompt: list[int], load: ServeLoad) -> MeasuredRequest:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.output_len,
        "temperature": load.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.timeline:
        body["baton_timeline"] = True
    answer = MeasuredRequest()
    start_s = last_s = time.perf_counter()
    try:
        async with client.post(load.at("/v1/completions"), json=body) as response:
            if not response.ok:
                answer.error = (await response.read()).decode(errors="replace")
                return answer
            async for event in _events(response.content):
                if event.error is not None:
                    answer.error = str(event.error)
                    return answer
                now_s = time.perf_counter()
                if event.choices:
                    if answer.ttft_s:
                        answer.itl_s.append(now_s - last_s)
                    else:
                        answer.ttft_s = now_s - start_s
                    last_s = now_s
                if event.usage is not None:
                    answer.output_tokens = event.usage.completion_tokens
                for timeline in event.baton_timeline:
                    for part in timeline.parts:
                        answer.parts_s[part.stamp] = answer.parts_s.get(part.stamp, 0.0) + part.part_s
                    answer.drafts += DraftCounts(
                        timeline.num_drafts, timeline.num_draft_tokens, timeline.num_accepted_tokens
                    )
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.latency_s = last_s - start_s
    return answer


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[_Event]:
    """Yield the events of a stream of server-sent events. Raises `MsgspecError` for what is none."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data: ").rstrip(b"\r")
            if len(data) < len(line.rstrip(b"\r")) and data != b"[DONE]":
                yield _decode(data)


def summary(load: ServeLoad, model: str, answers: Sequence[MeasuredRequest], duration_s: float) -> dict[str, Any]:
    """Return the figures under `vllm bench serve`'s names. Times end in `_ms`; means over no value are 0."""
    good = [answer for answer in answers if not answer.error]
    output_tokens = sum(answer.output_tokens for answer in good)
    input_tokens = load.input_len * len(good)
    result: dict[str, Any] = {
        "model_id": model,
        "num_prompts": len(answers),
        "request_rate": load.request_rate or "inf",
        "max_concurrency": load.max_concurrency,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration_s,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (input_tokens + output_tokens) / duration_s,
    }
    samples = {
        "ttft": [answer.ttft_s for answer in good],
        "tpot": [(a.latency_s - a.ttft_s) / (a.output_tokens - 1) for a in good if a.output_tokens > 1],
        "itl": [seconds for answer in good for seconds in answer.itl_s],
        "e2el": [answer.latency_s for answer in good],
    }
    for name, seconds in samples.items():
        result |= _figures(name, seconds)
    if load.timeline:
        result["median_parts_ms"] = _median_parts_ms(good)
        result |= _acceptance(good)
    result["errors"] = sorted({answer.error for answer in answers if answer.error})
    return result


def _acceptance(answers: Sequence[MeasuredRequest]) -> dict[str, float]:
    """Return what became of drafts, under `vllm bench serve`'s names; nothing where no engine has guessed."""
    drafts = sum((answer.drafts for answer in answers), NO_DRAFTS)
    counted = SpeculationStats(drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens)
    if not counted.num_drafts:
        return {}
    return {
        "spec_decode_num_drafts": counted.num_drafts,
        "spec_decode_draft_tokens": counted.num_draft_tokens,
        "spec_decode_accepted_tokens": counted.num_accepted_tokens,
        "spec_decode_acceptance_rate": 100 * counted.acceptance_rate,
        "spec_decode_acceptance_length": counted.mean_length,
    }


def _figures(name: str, seconds: Sequence[float]) -> dict[str, float]:
    values = [1000 * value for value in seconds] or [0.0]
    figures = {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
        f"std_{name}_ms": statistics.pstdev(values),
    }
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return figures | {f"p{percent}_{name}_ms": cuts[percent - 1] for percent in PERCENTILES}


def _median_parts_ms(answers: Sequence[MeasuredRequest]) -> dict[str, float]:
    """Return the median of each part by stamp, over all answers: a part that an answer lacks took it no time."""
    stamps = dict.fromkeys(stamp for answer in answers for stamp in answer.parts_s)
    return {stamp: 1000 * statistics.median(answer.parts_s.get(stamp, 0.0) for answer in answers) for stamp in stamps}
