"""Outputs for a request: its tokens as they become known, and its end."""

from __future__ import annotations

from ..messages import EngineError, EngineOutput, EngineRequest, FinishReason, KVSource
from ..stages import Ages
from ..step import ChunkResult
from .request import Request


def next_token(request: Request, drawn: ChunkResult) -> EngineOutput:
    """The newest token, where it is neither the first nor the last."""
    return EngineOutput(
        request_id=request.request_id,
        generation=request.generation,
        token_ids=request.token_ids[-1:],
        logprobs=None if drawn.logprobs is None else [drawn.logprobs],
    )


def first_or_last_token(
    request: Request, drawn: ChunkResult, reason: FinishReason | None, kv_source: KVSource | None
) -> EngineOutput:
    """The newest token, with what is said once: of the prompt with the first, of the end with the last."""
    first = not request.answered
    request.answered = True
    return EngineOutput(
        request_id=request.request_id,
        generation=request.generation,
        token_ids=request.token_ids[-1:],
        logprobs=None if drawn.logprobs is None else [drawn.logprobs],
        prompt_logprobs=request.prompt_logprobs.entries if first and request.prompt_logprobs else None,
        num_cached_tokens=request.num_cached_tokens if first else 0,
        ages=request.stages.ages() if first else None,
        finish_reason=reason,
        stop_token_id=request.token_ids[-1] if reason is FinishReason.STOP else None,
        kv_source=kv_source,
    )


def on_offer(request: Request, source: KVSource) -> EngineOutput:
    """The prompt's KV may be fetched while it is written: no token yet."""
    return EngineOutput(request_id=request.request_id, generation=request.generation, kv_source=source)


def last_words(
    message: EngineRequest, reason: FinishReason, error: EngineError | None = None, ages: Ages | None = None
) -> EngineOutput:
    """An end that no token brings."""
    return EngineOutput(
        request_id=message.request_id,
        generation=message.generation,
        finish_reason=reason,
        error=error,
        ages=ages,
    )
