"""Rows that have nothing to draw, because what their requests ask for excludes every token.

A device cannot answer: such a row draws `FROM_NOTHING`, whatever excludes that one, too. Here it is told from a draw.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .grammar import ASKED_BY
from .messages import EngineError, ErrorKind
from .sampling import SamplingParams

FROM_NOTHING = 0  # the token that a row draws which has none to draw


def excludes(sampling: SamplingParams, stop_token_ids: Collection[int], output: Sequence[int], token_id: int) -> bool:
    """Whether the token may not follow `output`, all outputs before it. What a grammar says of it is another matter."""
    if sampling.allowed_token_ids is not None and token_id not in sampling.allowed_token_ids:
        return True
    if len(output) < sampling.min_tokens and token_id in stop_token_ids:
        return True
    return any(_completes(word, output, token_id) for word in sampling.bad_words_token_ids)


def nothing_left(*, constrained: bool) -> EngineError:
    """The answer where a row had nothing to draw. `constrained`: it has a grammar."""
    if constrained:
        reason = "what may follow is excluded by allowed_token_ids, bad_words or logit_bias: leave them out"
        return EngineError(ErrorKind.INVALID, f"{ASKED_BY}: {reason}")
    reason = "bad_words, or min_tokens with its stop tokens, exclude every token that is left: change one of them"
    return EngineError(ErrorKind.INVALID, f"allowed_token_ids: {reason}")


def _completes(word: Sequence[int], output: Sequence[int], token_id: int) -> bool:
    before = len(word) - 1
    return word[-1] == token_id and before <= len(output) and list(output[len(output) - before :]) == list(word[:-1])
