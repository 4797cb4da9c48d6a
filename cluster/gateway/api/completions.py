"""Responses of `/v1/completions`."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from baton.engine.text import Tokenizer

from ..errors import ApiError
from ..serving.timeline import TimelineReport
from .detokenize import ChoiceDelta
from .job import GenerationJob, UsageOptions
from .logprobs import CompletionLogprobs, PromptLogprob, prompt_logprobs
from .renderer import DONE, Usage, UsageCounter, encode, error_event, join, sse


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class Completion(msgspec.Struct, tag_field="object", tag="text_completion"):
    """A whole response, or a chunk of one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    baton_timeline: list[TimelineReport] | UnsetType = UNSET


class CompletionRenderer:
    """The `Renderer` of completions."""

    def __init__(self, job: GenerationJob, model_id: str, tokenizer: Tokenizer, usage: UsageOptions) -> None:
        self._job = job
        self._model_id = model_id
        self._tokenizer = tokenizer
        self._usage = usage
        self._tally = UsageCounter(job)
        self._begun = [False] * len(job.sequences)

    def event(self, index: int, delta: ChoiceDelta, event_id: bytes = b"") -> bytes:
        delta = self._count(index, delta)
        echoes = self._job.echoes is not None and not self._begun[index]
        if not (delta.text or delta.tokens or delta.finish_reason or echoes):
            return b""
        return sse(self._completion([self._choice(index, delta)], self._tally.in_chunk(self._usage)), event_id)

    def end(self) -> bytes:
        told = self._tally.at_end(self._usage)
        return (sse(self._completion([], *told)) if told else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        return error_event(error)

    def whole(self, choices: list[list[ChoiceDelta]]) -> bytes:
        joined = [self._count(index, join(deltas)) for index, deltas in enumerate(choices)]
        answer = [self._choice(index, delta) for index, delta in enumerate(joined)]
        return encode(self._completion(answer, self._tally.usage(), self._tally.timelines()))

    def _completion(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType | None,
        timelines: list[TimelineReport] | UnsetType = UNSET,
    ) -> Completion:
        return Completion(f"cmpl-{self._job.request_id}", self._job.created, self._model_id, choices, usage, timelines)

    def _count(self, index: int, delta: ChoiceDelta) -> ChoiceDelta:
        if self._job.scores_only:  # the engine had to generate one token, which nobody asked for
            delta = ChoiceDelta(
                num_cached_tokens=delta.num_cached_tokens,
                prompt_logprobs=delta.prompt_logprobs,
                finish_reason="length" if delta.finish_reason else None,
                timeline=delta.timeline,
            )
        self._tally.add(index, delta)
        return delta

    def _choice(self, index: int, delta: ChoiceDelta) -> CompletionChoice:
        job, opens = self._job, not self._begun[index]
        self._begun[index] = True
        prompt = index // job.sampling.n
        echo = job.echoes[prompt] if job.echoes is not None else ""
        text = echo + delta.text if opens else delta.text
        logprobs = CompletionLogprobs()
        if opens and job.echoes is not None and delta.prompt_logprobs is not None:
            logprobs.add_prompt(self._tokenizer, job.prompts[prompt], delta.prompt_logprobs, echo)
        logprobs.add(self._tokenizer, delta.tokens, len(echo))
        choice = CompletionChoice(
            index, text, logprobs if logprobs.tokens else None, delta.finish_reason, delta.stop_reason
        )
        if job.shows_prompt_logprobs and delta.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._tokenizer, delta.prompt_logprobs)
        return choice
