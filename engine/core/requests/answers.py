"""Outputs of a request: new tokens, the end, and the error if no token could be drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..logprobs import Logprobs
from ..messages import EngineError, EngineOutput, EngineRequest, ErrorKind, FinishReason, KVSource
from ..sampling import SamplingParams
from ..speculation.stats import DraftCounts
from ..stages import Ages
from .request import Request


def next_tokens(request: Request, token_ids: list[int], logprobs: Logprobs | None) -> EngineOutput:
    """Return an output with tokens that are neither the request's first nor its last."""
    return EngineOutput(
        request_id=request.request_id,
        generation=request.generation,
        token_ids=token_ids,
        logprobs=logprobs,
        drafts=_take_drafts(request, token_ids) if request.drafts is not None else None,
    )


def first_or_last_tokens(
    request: Request,
    token_ids: list[int],
    logprobs: Logprobs | None,
    reason: FinishReason | None,
    kv_source: KVSource | None,
) -> EngineOutput:
    """Return an output with the first or the last tokens, with data of the prompt or of the end."""
    first = not request.answered
    request.answered = True
    return EngineOutput(
        request_id=request.request_id,
        generation=request.generation,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs.joined() if first and request.prompt_logprobs else None,
        num_cached_tokens=request.num_cached_tokens if first else 0,
        drafts=_take_drafts(request, token_ids) if request.drafts is not None else None,
        ages=request.stages.ages() if first else None,
        finish_reason=reason,
        stop_token_id=request.token_ids[-1] if reason is FinishReason.STOP else None,
        kv_source=kv_source,
    )


def _take_drafts(request: Request, token_ids: list[int]) -> DraftCounts:
    """Return the draft counts of the step that drew these tokens. Drafts accepted after the last token do not count."""
    drafts, request.drafts = request.drafts, None
    assert drafts is not None
    return drafts.within(len(token_ids))


def on_offer(request: Request, source: KVSource) -> EngineOutput:
    """Return an output without a token: the prompt's KV may be read while it is being written."""
    return EngineOutput(request_id=request.request_id, generation=request.generation, kv_source=source)


def final_output(
    message: EngineRequest, reason: FinishReason, error: EngineError | None = None, ages: Ages | None = None
) -> EngineOutput:
    """Return the output that ends a request without another token."""
    return EngineOutput(
        request_id=message.request_id,
        generation=message.generation,
        finish_reason=reason,
        error=error,
        ages=ages,
    )


def nothing_drawn(request: Request, num_before: int) -> EngineError:
    """Return the error of a request for which the newest step drew nothing after the first `num_before` of its tokens.

    Either the request itself excludes every token, so that no engine could draw one. Or the logits are not numbers,
    because weights or KV are damaged; then another engine may succeed.
    """
    if not _excludes_all(request, _candidates(request, num_before)):
        reason = "no logit of the model is a number: its weights or the KV of the request may be damaged"
        return EngineError(ErrorKind.INTERNAL, f"no token could be drawn: {reason}")
    if request.is_constrained:
        field = "bad_words_token_ids" if request.message.sampling.allowed_token_ids is None else "allowed_token_ids"
        reason = "excludes every token that may follow in an answer that must fit a grammar: leave it out"
        return EngineError(ErrorKind.INVALID, reason, field)
    reason = (
        "leaves no token to draw: 'bad_words', or 'min_tokens' with its stop tokens, excludes all tokens that it allows"
    )
    return EngineError(ErrorKind.INVALID, reason, "allowed_token_ids")


def _candidates(request: Request, number: int) -> Iterable[int] | None:
    """Return the tokens that the request allows for draw `number` of the step; None if it has no such list."""
    if request.is_constrained:
        mask = request.drawn_from[number]
        return (token_id for token_id in range(8 * len(mask)) if mask[token_id // 8] >> token_id % 8 & 1)
    return request.message.sampling.allowed_token_ids


def _excludes_all(request: Request, candidates: Iterable[int] | None) -> bool:
    """Return whether the request excludes all `candidates`. Bad words alone never exclude a whole vocabulary."""
    if candidates is None:
        return False
    sampling, output = request.message.sampling, request.token_ids[request.num_prompt :]
    stop_token_ids = request.finish_rule.stop_token_ids
    too_soon = stop_token_ids if len(output) < sampling.min_tokens else frozenset()
    return all(token_id in too_soon or _excludes(sampling, output, token_id) for token_id in candidates)


def _excludes(sampling: SamplingParams, output: Sequence[int], token_id: int) -> bool:
    if sampling.allowed_token_ids is not None and token_id not in sampling.allowed_token_ids:
        return True
    return any(_completes(word, output, token_id) for word in sampling.bad_words_token_ids)


def _completes(word: Sequence[int], output: Sequence[int], token_id: int) -> bool:
    before = len(word) - 1
    return word[-1] == token_id and before <= len(output) and list(output[len(output) - before :]) == list(word[:-1])
