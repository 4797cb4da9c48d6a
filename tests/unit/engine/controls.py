"""Comparisons of answers: prompts of random tokens, and requests that are greedy or use every sampling control."""

from __future__ import annotations

import random

import msgspec

from baton.engine import CompletionOutput, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)
EVERYTHING = SamplingParams(
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=1.5,
    frequency_penalty=1.0,
    seed=1234,
    min_tokens=8,
    stop_token_ids=[7],
    logit_bias={5: 2.0, 9: -3.0},
    bad_words_token_ids=[[11], [12, 13]],
    max_tokens=24,
    logprobs=3,
)

WAYS: dict[str, dict[str, object]] = {  # ways to serve a batch: arguments of the engine
    "batched": {},
    "chunked": {"max_num_batched_tokens": 16},
    "two in flight": {"async_scheduling": True},
    "preempted": {"num_gpu_blocks_override": 16},
    "preempted, two in flight": {"num_gpu_blocks_override": 16, "async_scheduling": True},
    "one by one": {"enable_prefix_caching": False, "max_num_seqs": 1},
}


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 256) for _ in range(length)] for length in lengths]


def own_seeds(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Return a seed for each of `count` prompts, so that no two draw alike."""
    if params.seed is None:
        return [params] * count
    return [msgspec.structs.replace(params, seed=params.seed + i) for i in range(count)]


ROUNDING = 0.05  # of a logprob, in bfloat16


def differences(one: CompletionOutput, other: CompletionOutput) -> list[float]:
    """Return how far the logprobs of two answers differ, up to the first token that differs."""
    assert one.logprobs is not None
    assert other.logprobs is not None
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
    count = next((i for i, (a, b) in pairs if a != b), len(one.token_ids))
    same = zip(one.token_ids[:count], one.logprobs, other.logprobs, strict=False)
    return [abs(a[token].logprob - b[token].logprob) for token, a, b in same]


def agreed(one: CompletionOutput, other: CompletionOutput) -> int:
    """Return the number of leading tokens that two answers share, with equal logprobs."""
    apart = differences(one, other)
    assert max(apart, default=0.0) <= ROUNDING
    return len(apart)
