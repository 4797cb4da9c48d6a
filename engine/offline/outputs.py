"""Outputs of `LLM`. Names are vLLM's, so that scripts written for one run on the other."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """The log probability and rank of one token at one position."""

    logprob: float  # natural logarithm, before temperature and penalties
    rank: int  # among the whole vocabulary, 1 is the most likely
    decoded_token: str | None = None  # None without a tokenizer


@dataclass
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # where logprobs were asked for
    logprobs: list[dict[int, Logprob]] | None = None  # one per token: the token itself, then the most likely ones
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: int | str | None = None  # the stop token or string that ended it; None for the end-of-sequence token


@dataclass
class RequestOutput:
    """One prompt and its continuations."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # one per prompt token; None for the first
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
