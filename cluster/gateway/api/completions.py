"""Responses of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec
from msgspec import UNSET, UnsetType

from baton.engine.text import Tokenizer

from ..errors import ApiError
from ..serving.timeline import TimelineReport
from .detokenize import ChoiceDelta
from .job import GenerationJob
from .logprobs import answer_positions, completion_logprobs, prompt_logprobs, prompt_positions
from .renderer import DONE, HOLE, Pieces, Text, Usage, UsageCounter, at_once, error_event, fill, join, sse, sse_filled


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: msgspec.Raw | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: msgspec.Raw | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET  # with `return_token_ids`
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first chunk of a choice, with `return_token_ids`


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

    needs_each_delta = False

    def __init__(self, job: GenerationJob, model_id: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._model_id = model_id
        self._tokenizer = tokenizer
        self._counter = UsageCounter(job)
        self._begun = [False] * len(job.sequences)

    def event(self, index: int, delta: ChoiceDelta, event_id: bytes = b"") -> Text:
        delta = self._count(index, delta)
        echoes = self._job.prepared.echoes is not None and not self._begun[index]
        if not (delta.text or delta.tokens or delta.token_ids or delta.finish_reason or echoes):
            return b""
        choice, parts = self._choice(index, delta)
        chunk = self._completion([choice], self._counter.in_chunk())
        return sse_filled(chunk, event_id, parts, delta.num_logprobs) if parts else sse(chunk, event_id)

    def end(self) -> bytes:
        ending = self._counter.at_end()
        return (sse(self._completion([], *ending)) if ending else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        return error_event(error)

    def whole(self, choices: Sequence[Sequence[ChoiceDelta]]) -> Text:
        joined = [self._count(index, join(deltas)) for index, deltas in enumerate(choices)]
        answer = [self._choice(index, delta) for index, delta in enumerate(joined)]
        completion = self._completion(
            [choice for choice, _ in answer], self._counter.usage(), self._counter.timelines()
        )
        parts = [part for _, its_own in answer for part in its_own]
        return at_once(fill(completion, parts), sum(delta.num_logprobs for delta in joined))

    def _completion(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType | None,
        timelines: list[TimelineReport] | UnsetType = UNSET,
    ) -> Completion:
        return Completion(f"cmpl-{self._job.request_id}", self._job.created, self._model_id, choices, usage, timelines)

    def _count(self, index: int, delta: ChoiceDelta) -> ChoiceDelta:
        if self._job.prepared.scores_only:  # the engine had to generate one token; it was not asked for
            delta = ChoiceDelta(
                num_cached_tokens=delta.num_cached_tokens,
                prompt_logprobs=delta.prompt_logprobs,
                finish_reason="length" if delta.finish_reason else None,
                timeline=delta.timeline,
            )
        self._counter.add(index, delta)
        return delta

    def _choice(self, index: int, delta: ChoiceDelta) -> tuple[CompletionChoice, list[Pieces]]:
        """Return a choice, and the parts that fill the holes in its JSON."""
        prepared, opens = self._job.prepared, not self._begun[index]
        self._begun[index] = True
        prompt = index // prepared.sampling.n
        echo = prepared.echoes[prompt] if prepared.echoes is not None else ""
        text = echo + delta.text if opens else delta.text
        choice = CompletionChoice(index, text, None, delta.finish_reason, delta.stop_reason)
        if prepared.returns_token_ids:
            choice.token_ids = delta.token_ids
            choice.prompt_token_ids = prepared.prompts[prompt] if opens else UNSET
        parts: list[Pieces] = []
        positions = answer_positions(delta.tokens, len(echo))
        echoes = opens and prepared.echoes is not None and delta.prompt_logprobs is not None
        if echoes and delta.prompt_logprobs is not None:
            before = prompt_positions(self._tokenizer, prepared.prompts[prompt], delta.prompt_logprobs, echo)
            positions = chain(before, positions)
        if echoes or delta.tokens:
            choice.logprobs = HOLE
            parts.append(completion_logprobs(self._tokenizer, positions))
        if prepared.shows_prompt_logprobs and delta.prompt_logprobs is not None:
            choice.prompt_logprobs = HOLE
            parts.append(prompt_logprobs(self._tokenizer, delta.prompt_logprobs))
        return choice, parts
