"""Builds one continuation, as users see it, from the engine's outputs; and the progress bar of `LLM`.

The bar shows finished prompts, and the rates of prompt and output tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..core.logprobs import TokenLogprobs
from ..core.messages import EngineOutput
from ..core.sampling import SamplingParams
from ..text import TextStream, Tokenizer

if TYPE_CHECKING:
    from rich.progress import Progress

UPDATE_S = 0.1


@dataclass(frozen=True)
class Logprob:
    """The log probability and rank of one token at one position."""

    logprob: float  # natural logarithm, before temperature and penalties
    rank: int  # in the whole vocabulary; 1 is the most likely
    decoded_token: str | None = None  # incomplete characters as escaped bytes, such as \xf0; None without a tokenizer
    token_bytes: bytes | None = None  # None without a tokenizer


@dataclass
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # if logprobs were requested
    logprobs: list[dict[int, Logprob]] | None = None  # one for each token: the token itself, then the most likely ones
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: int | str | None = None  # the stop token or string that ended it; None for the end-of-sequence token


@dataclass
class RequestOutput:
    """One prompt and its continuations."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # one for each prompt token; None for the first
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache


class Continuation:
    """Collects the tokens of one engine request: text, stop strings, logprobs, and the finish reason.

    Without a tokenizer, or with `detokenize=False`, the text stays empty.
    """

    def __init__(
        self, index: int, prompt_token_ids: Sequence[int], params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.output = CompletionOutput(index=index, text="", token_ids=[])
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self._prompt_token_ids = prompt_token_ids
        self._params = params
        self._tokenizer = tokenizer

    def take(self, step: EngineOutput) -> None:
        """Add the output of one step. If the engine or a stop string ended it, `output.finish_reason` is set."""
        output = self.output
        num_tokens, stop = len(step.token_ids), None
        if self._text is not None:
            finished = step.finish_reason is not None
            delta = self._text.push(step.token_ids, finished=finished, stop_token_id=step.stop_token_id)
            output.text += delta.text
            num_tokens, stop = delta.num_tokens, delta.stop
        output.token_ids += step.token_ids[:num_tokens]
        if step.logprobs is not None:
            for entry in step.logprobs.entries(0, num_tokens):
                self._add_logprobs(entry)
        if stop is not None:
            output.finish_reason, output.stop_reason = "stop", stop
        elif step.finish_reason is not None:
            output.finish_reason = step.finish_reason.value
            if step.stop_token_id in self._params.stop_token_ids:
                output.stop_reason = step.stop_token_id

    @cached_property
    def _text(self) -> TextStream | None:
        """The text so far. It begins with the first output, when the engine has accepted the prompt's token ids."""
        if self._tokenizer is None or not self._params.detokenize:
            return None
        return TextStream(self._tokenizer, self._params, self._prompt_token_ids)

    def _add_logprobs(self, entry: TokenLogprobs) -> None:
        assert self.output.logprobs is not None
        assert self.output.cumulative_logprob is not None
        self.output.logprobs.append(logprob_dict(entry, self._tokenizer))
        self.output.cumulative_logprob += entry.logprobs[0]


def logprob_dict(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Return log probabilities by token: the token itself first, then the most likely ones, best first."""
    ranks = (entry.rank, *range(1, len(entry.token_ids)))
    found: dict[int, Logprob] = {}
    for token, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
        shown = (None, None) if tokenizer is None else (tokenizer.token_text(token), tokenizer.token_bytes(token))
        found.setdefault(token, Logprob(logprob, rank, *shown))
    return found


class PromptsBar:
    """A progress bar. It counts every token, but is drawn only a few times a second, since drawing is slow."""

    def __init__(self, progress: Progress, num_prompts: int) -> None:
        self._progress = progress
        self._num_prompts = num_prompts
        self._task = progress.add_task("prompts", total=num_prompts, speed="")
        self._start = self._told = time.perf_counter()
        self._tokens_in = self._tokens_out = self._finished = 0

    def advance(self, num_tokens: int, output: RequestOutput) -> None:
        """Count `num_tokens` more output tokens for a prompt."""
        self._tokens_out += num_tokens
        if output.finished:
            self._finished += 1
            self._tokens_in += len(output.prompt_token_ids)
        now = time.perf_counter()
        if now - self._told < UPDATE_S and self._finished < self._num_prompts:
            return
        self._told, elapsed = now, now - self._start
        speed = f"{self._tokens_in / elapsed:.0f} tokens/s in, {self._tokens_out / elapsed:.0f} out"
        self._progress.update(self._task, completed=self._finished, speed=speed)


@contextmanager
def prompts_bar(num_prompts: int) -> Iterator[PromptsBar]:
    """Draw the bar on stderr within the context."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield PromptsBar(progress, num_prompts)
