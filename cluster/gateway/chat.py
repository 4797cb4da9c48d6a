"""The JSON of `/v1/chat/completions`."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from baton.engine.text import Tokenizer

from .assembly import Delta
from .logprobs import ChatLogprobs, PromptLogprob, chat_logprobs, prompt_logprobs
from .prepare import Job
from .render import DONE, Tally, Usage, UsageOptions, encode, join, sse


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, tag_field="object", tag="chat.completion.chunk"):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ChatMessage(msgspec.Struct, tag_field="role", tag="assistant"):
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatCompletion(msgspec.Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class ChatRenderer:
    """See `Renderer`."""

    def __init__(self, job: Job, model_id: str, tokenizer: Tokenizer, usage: UsageOptions) -> None:
        self._id = f"chatcmpl-{job.request_id}"
        self._job = job
        self._model_id = model_id
        self._tokenizer = tokenizer
        self._usage = usage
        self._tally = Tally(job)
        self._begun = [False] * len(job.sequences)

    def event(self, index: int, delta: Delta, event_id: bytes = b"") -> bytes:
        self._tally.add(index, delta)
        opening = b""
        if not self._begun[index]:
            self._begun[index] = True
            opening = self._chunk([ChunkChoice(index, ChatDelta(role="assistant", content=""))])
        if not (delta.text or delta.tokens or delta.finish_reason):
            return opening
        choice = ChunkChoice(
            index,
            ChatDelta(content=delta.text) if delta.text else ChatDelta(),
            self._logprobs(delta),
            delta.finish_reason,
            delta.stop_reason if delta.finish_reason else UNSET,
        )
        return opening + self._chunk([choice], event_id)

    def end(self) -> bytes:
        if not self._usage.at_end:
            return DONE
        return sse(ChatChunk(self._id, self._job.created, self._model_id, [], self._tally.usage())) + DONE

    def whole(self, choices: list[list[Delta]]) -> bytes:
        answer = []
        prompt = None
        for index, deltas in enumerate(choices):
            delta = join(deltas)
            self._tally.add(index, delta)
            prompt = prompt or delta.prompt_logprobs  # the same for all choices
            message = ChatMessage(delta.text)
            answer.append(ChatChoice(index, message, self._logprobs(delta), delta.finish_reason, delta.stop_reason))
        completion = ChatCompletion(self._id, self._job.created, self._model_id, answer, self._tally.usage())
        if prompt is not None:
            completion.prompt_logprobs = prompt_logprobs(self._tokenizer, prompt)
        return encode(completion)

    def _chunk(self, choices: list[ChunkChoice], event_id: bytes = b"") -> bytes:
        usage = self._tally.in_chunk(self._usage)
        return sse(ChatChunk(self._id, self._job.created, self._model_id, choices, usage), event_id)

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, delta.tokens) if delta.tokens else None
