"""Requests of a data set, and the times at which they are sent.

random        random tokens, of the lengths given by options
prefix_repetition  random prefixes, each repeated before different random tokens
sharegpt      conversations: the first turn is the prompt, the length of the second is the length of the answer
custom        JSON lines: {"prompt": "...", "output_tokens": 32}, for chats with an optional "prediction": "..."
timed_trace   JSON lines: {"timestamp": ms, "input_length", "output_length", "hash_ids"}, sent at these times
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from baton.cluster.simulation.traffic import InvalidTrace, trace

from .options import (
    CUSTOM_OUTPUT_LEN,
    DEFAULT_OUTPUT_LEN,
    PREFIX_REPETITION_OUTPUT_LEN,
    DataSet,
    InvalidLoad,
    LoadBackend,
    RampUp,
    ServeLoad,
)

ALPHABET = " abcdefghijklmnopqrstuvwxyz0123456789"
# Conversations outside these limits are left out, as in vLLM: too short to be measured, or longer than most contexts.
LEAST_TOKENS, MOST_PROMPT_TOKENS, MOST_TOKENS = 4, 1024, 2048


@dataclass(frozen=True)
class LoadRequest:
    prompt: str | list[int]  # a text, or token ids
    output_tokens: int
    at_s: float | None = None  # after the first request; None: the load's pace decides
    prediction: str | None = None  # the answer that a chat expects


class TextTokens(Protocol):
    """The model's tokenizer: a local one, or the server's routes."""

    async def encode(self, text: str) -> list[int]: ...

    async def decode(self, tokens: list[int]) -> str: ...


async def load_requests(load: ServeLoad, tokens: TextTokens) -> list[LoadRequest]:
    """Return a run's requests, warm-ups first. Raises `InvalidLoad` for a file that does not fit its data set."""
    rng = random.Random(load.seed)
    num_requests = load.num_prompts
    match load.dataset_name:
        case DataSet.RANDOM:
            return await _as_sent(load, _random(load, rng, await tokens.encode(ALPHABET)), tokens)
        case DataSet.PREFIX_REPETITION:
            return await _as_sent(load, _repeated_prefixes(load, rng, await tokens.encode(ALPHABET)), tokens)
        case DataSet.SHAREGPT:
            found = await _sharegpt(load, rng, tokens)
        case DataSet.CUSTOM:
            found = _custom(load)
            if not load.disable_shuffle:
                rng.shuffle(found)
        case DataSet.TIMED_TRACE:
            found = _traced(load, await tokens.encode(ALPHABET))[:num_requests]
            found = await _as_sent(load, found, tokens)
            return found[:1] * load.num_warmups + found
    if len(found) < num_requests and not load.no_oversample:
        found += rng.choices(found, k=num_requests - len(found))
    return rng.choices(found, k=load.num_warmups) + found[:num_requests]


async def _as_sent(load: ServeLoad, requests: list[LoadRequest], tokens: TextTokens) -> list[LoadRequest]:
    """Return requests with prompts in the form that the load's backend accepts: for chats, token ids become text."""
    if load.backend is not LoadBackend.OPENAI_CHAT:
        return requests
    texts = [await tokens.decode(each.prompt) for each in requests if isinstance(each.prompt, list)]
    return [replace(each, prompt=text) for each, text in zip(requests, texts, strict=True)]


def _random(load: ServeLoad, rng: random.Random, plain: Sequence[int]) -> list[LoadRequest]:
    prefix = rng.choices(plain, k=load.random_prefix_len)
    output_len = load.output_len or DEFAULT_OUTPUT_LEN

    def spread(mean: int) -> int:
        ratio = load.random_range_ratio
        return max(1, rng.randint(math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio)))) if ratio else mean

    return [
        LoadRequest(prefix + rng.choices(plain, k=spread(load.input_len)), spread(output_len))
        for _ in range(load.num_warmups + load.num_prompts)
    ]


def _repeated_prefixes(load: ServeLoad, rng: random.Random, plain: Sequence[int]) -> list[LoadRequest]:
    """Return requests in random order, in which all prefixes occur equally often."""
    num_requests = load.num_warmups + load.num_prompts
    prefixes = [
        rng.choices(plain, k=load.prefix_repetition_prefix_len) for _ in range(load.prefix_repetition_num_prefixes)
    ]
    found = [
        LoadRequest(
            prefixes[number % len(prefixes)] + rng.choices(plain, k=load.prefix_repetition_suffix_len),
            load.output_len or PREFIX_REPETITION_OUTPUT_LEN,
        )
        for number in range(num_requests)
    ]
    if not load.disable_shuffle:
        rng.shuffle(found)
    return found


async def _sharegpt(load: ServeLoad, rng: random.Random, tokens: TextTokens) -> list[LoadRequest]:
    """Read conversations until there are enough, leaving out those that are too short or too long."""
    turns = list(_first_turns(_file(load)))
    if not load.disable_shuffle:
        rng.shuffle(turns)
    found: list[LoadRequest] = []
    for asked, answered in turns:
        if len(found) == load.num_prompts:
            break
        num_asked, num_answered = len(await tokens.encode(asked)), load.output_len
        if num_answered is None:
            num_answered = len(await tokens.encode(answered))
        is_long_enough = num_asked >= LEAST_TOKENS and (load.output_len is not None or num_answered >= LEAST_TOKENS)
        if is_long_enough and num_asked <= MOST_PROMPT_TOKENS and num_asked + num_answered <= MOST_TOKENS:
            found.append(LoadRequest(asked, num_answered))
    if not found:
        raise InvalidLoad(
            f"{load.dataset_path} has no conversation whose first two turns have {LEAST_TOKENS} to {MOST_TOKENS} tokens"
        )
    return found


def _first_turns(path: Path) -> Iterator[tuple[str, str]]:
    try:
        conversations = json.loads(path.read_text())
        for each in conversations:
            turns = each.get("conversations") or each.get("conversation") or []
            if len(turns) >= 2:
                yield str(turns[0]["value"]), str(turns[1]["value"])
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise InvalidLoad(
            f'{path} is not in the form of ShareGPT, [{{"conversations": [{{"from", "value"}}, ...]}}, ...]: {error!r}'
        ) from error


def _custom(load: ServeLoad) -> list[LoadRequest]:
    path, found = _file(load), []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt, length = entry["prompt"], load.output_len or entry.get("output_tokens", CUSTOM_OUTPUT_LEN)
            if not (isinstance(prompt, str) and prompt and isinstance(length, int) and length > 0):
                raise ValueError("'prompt' must be a text, and 'output_tokens' a number above 0")
            prediction = entry.get("prediction")
            if not (prediction is None or (isinstance(prediction, str) and load.backend is LoadBackend.OPENAI_CHAT)):
                raise ValueError("'prediction' must be a text, and needs --backend openai-chat")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidLoad(
                f'{path}, line {number}: give {{"prompt": "...", "output_tokens": 32}}: {error}'
            ) from error
        found.append(LoadRequest(prompt, length, prediction=prediction))
    if not found:
        raise InvalidLoad(f"{path} has no prompts: give one a line")
    return found


def _traced(load: ServeLoad, plain: Sequence[int]) -> list[LoadRequest]:
    """Return a trace's requests: each hash id becomes its own random tokens, so that equal prefixes stay equal."""
    try:
        arrivals = trace(_file(load))
    except InvalidTrace as error:
        raise InvalidLoad(str(error)) from error
    first_s = arrivals[0].at_s
    return [
        LoadRequest(
            [plain[token % len(plain)] for token in each.prompt],
            load.output_len or each.output_tokens,
            (each.at_s - first_s) / load.trace_speed if load.is_self_timed else None,
        )
        for each in arrivals
    ]


def _file(load: ServeLoad) -> Path:
    assert load.dataset_path is not None, "the options were checked"
    return load.dataset_path


def delays_s(load: ServeLoad, num_requests: int) -> Iterator[float]:
    """Yield the seconds between requests: gamma-distributed, which is a Poisson process at burstiness 1."""
    rng = random.Random(load.seed + 1)
    for index in range(num_requests):
        rate = _rate_at(load, index / max(1, num_requests - 1))
        if rate is None:
            yield 0.0
        elif math.isinf(load.burstiness):
            yield 1 / rate
        else:
            yield rng.gammavariate(load.burstiness, 1 / (rate * load.burstiness))


def _rate_at(load: ServeLoad, progress: float) -> float | None:
    """Return the rate after a share `progress` of the requests has been sent; None sends all at once."""
    start, end = load.ramp_up_start_rps, load.ramp_up_end_rps
    if load.ramp_up_strategy is None or start is None or end is None:
        return load.rate
    if load.ramp_up_strategy is RampUp.EXPONENTIAL:
        return start * (end / start) ** progress
    return start + (end - start) * progress


async def paced(
    load: ServeLoad,
    requests: Sequence[LoadRequest],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
) -> AsyncIterator[LoadRequest]:
    """Yield each request when it is due. A late request does not delay the ones behind it."""
    began_s = due_s = clock()
    for request, delay_s in zip(requests, delays_s(load, len(requests)), strict=True):
        if request.at_s is not None:
            due_s = began_s + request.at_s
        if (wait_s := due_s - clock()) > 0:
            await sleep(wait_s)
        yield request
        due_s += delay_s
