"""Traffic for simulations: requests with arrival times, from traces or at random."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

VOCAB_SIZE = 32_000
TRACE_BLOCK = 512  # tokens for which one hash id of a trace stands


@dataclass(frozen=True)
class RequestArrival:
    at_s: float
    prompt: list[int]
    output_tokens: int


class TraceLine(msgspec.Struct):
    """A request of a trace in Mooncake's format; other fields are ignored."""

    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None  # one for each `TRACE_BLOCK` tokens; equal ids mean equal prefixes; None: unknown


class InvalidTrace(ValueError):
    """A trace file that cannot be read as requests."""


def trace(path: Path) -> list[RequestArrival]:
    """Read a trace. Raises `InvalidTrace`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidTrace(f"{path} cannot be read: {error.strerror}") from error
    arrivals = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = msgspec.json.decode(line, type=TraceLine)
        except msgspec.DecodeError as error:
            raise InvalidTrace(f"{path}, line {number}: {error}") from error
        hash_ids = entry.hash_ids
        if hash_ids is None:  # make ids that no other line has
            hash_ids = [-(number << 32) - block for block in range(-(-max(entry.input_length, 0) // TRACE_BLOCK))]
        tokens = [token for hash_id in hash_ids for token in _tokens(hash_id, TRACE_BLOCK)]
        if not 0 < entry.input_length <= len(tokens) or entry.output_length < 1:
            raise InvalidTrace(
                f"{path}, line {number}: input_length {entry.input_length} with {len(hash_ids)} hash ids "
                f"and output_length {entry.output_length}"
            )
        arrivals.append(RequestArrival(entry.timestamp / 1e3, tokens[: entry.input_length], entry.output_length))
    if not arrivals:
        raise InvalidTrace(f"{path} holds no requests: give a file with one a line")
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


@dataclass(frozen=True)
class TrafficShape:
    """Random requests: Poisson arrivals, lengths spread by half to either side."""

    num_requests: int
    rate_per_s: float
    prompt_tokens: int  # mean
    output_tokens: int  # mean
    seed: int = 0


def unshared(shape: TrafficShape) -> list[RequestArrival]:
    """Make requests whose prompts share no prefixes."""
    rng = random.Random(shape.seed)
    return [
        RequestArrival(
            at_s, _tokens(rng.getrandbits(60), _spread(rng, shape.prompt_tokens)), _spread(rng, shape.output_tokens)
        )
        for at_s in _times(rng, shape)
    ]


def shared(shape: TrafficShape, *, num_systems: int, num_conversations: int) -> list[RequestArrival]:
    """Make conversations: each prompt is one of a few system prompts, the conversation up to then, and new text.

    The system prompt is half of the mean prompt. Its choice follows Zipf's law, so one system prompt is hot. A
    conversation that has grown to twice the mean begins again.
    """
    rng = random.Random(shape.seed)
    systems = [_tokens(rng.getrandbits(60), shape.prompt_tokens // 2) for _ in range(num_systems)]
    weights = [1 / (index + 1) for index in range(num_systems)]
    said: list[list[int]] = [[] for _ in range(num_conversations)]
    arrivals = []
    for at_s in _times(rng, shape):
        index = rng.randrange(num_conversations)
        if not said[index] or len(said[index]) > 2 * shape.prompt_tokens:
            said[index] = list(rng.choices(systems, weights)[0])
        said[index] = said[index] + _tokens(rng.getrandbits(60), _spread(rng, max(2, shape.prompt_tokens // 4)))
        arrivals.append(RequestArrival(at_s, said[index], _spread(rng, shape.output_tokens)))
    return arrivals


def tides(shape: TrafficShape, *, period_s: float, low: float = 0.1) -> list[RequestArrival]:
    """Make daily tides: the rate follows a cosine between `low` and 2 - `low` of the mean, from its lowest on."""

    def rate_at(at_s: float) -> float:
        return 1 - (1 - low) * math.cos(2 * math.pi * at_s / period_s)

    return _changing(shape, rate_at, 2 - low)


def bursts(shape: TrafficShape, *, every_s: float, lasting_s: float, times: float) -> list[RequestArrival]:
    """Make bursts, in which the rate is `times` as high as between them, where it begins. `rate_per_s` is the mean."""
    share = lasting_s / every_s
    low = 1 / (1 - share + share * times)

    def rate_at(at_s: float) -> float:
        return low * (times if at_s % every_s >= every_s - lasting_s else 1.0)

    return _changing(shape, rate_at, low * times)


def _changing(shape: TrafficShape, rate_at: Callable[[float], float], highest: float) -> list[RequestArrival]:
    """Make requests without shared prefixes; `rate_at` and its maximum `highest` are multiples of the mean rate."""
    rng, at_s = random.Random(shape.seed), 0.0
    arrivals: list[RequestArrival] = []
    while len(arrivals) < shape.num_requests:
        at_s += rng.expovariate(shape.rate_per_s * highest)
        if rng.random() * highest < rate_at(at_s):
            prompt = _tokens(rng.getrandbits(60), _spread(rng, shape.prompt_tokens))
            arrivals.append(RequestArrival(at_s, prompt, _spread(rng, shape.output_tokens)))
    return arrivals


def _times(rng: random.Random, shape: TrafficShape) -> Iterator[float]:
    at_s = 0.0
    for _ in range(shape.num_requests):
        at_s += rng.expovariate(shape.rate_per_s)
        yield at_s


def _spread(rng: random.Random, mean: int) -> int:
    return rng.randint(max(1, mean // 2), mean + mean // 2)


def _tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)
