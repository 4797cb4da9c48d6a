"""When a request is over. Decided here alone, from token ids and counts."""

from __future__ import annotations

from ..config import EngineCoreConfig
from ..messages import EngineRequest, FinishReason


class FinishRule:
    """The ways one request can end by itself.

    A stop token counts once `min_tokens` outputs exist before it. Lengths count prompt and output together.
    """

    __slots__ = ("_length_limit", "_min_length", "hands_off", "limit", "stop_token_ids")

    def __init__(self, request: EngineRequest, config: EngineCoreConfig) -> None:
        sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
        eos = [] if sampling.ignore_eos else config.eos_token_ids
        self.stop_token_ids = frozenset([*eos, *sampling.stop_token_ids])
        self._min_length = num_prompt + sampling.min_tokens
        self._length_limit = config.max_length
        if sampling.max_tokens is not None:
            self._length_limit = min(self._length_limit, num_prompt + sampling.max_tokens)
        # Known before any token is drawn, so no step is ever planned beyond it.
        self.limit = self._length_limit
        if request.keep_kv:
            self.limit = min(self.limit, num_prompt + len(request.output_token_ids) + 1)
        self.hands_off = self.limit < self._length_limit  # after one token, unless that is a stop token

    def reason(self, token_id: int, num_tokens: int) -> FinishReason | None:
        """Return why the request is over now that `token_id` is its token `num_tokens`; None where it goes on."""
        if num_tokens < self.limit and token_id not in self.stop_token_ids:
            return None
        if token_id in self.stop_token_ids and num_tokens > self._min_length:
            return FinishReason.STOP
        if num_tokens >= self._length_limit:
            return FinishReason.LENGTH
        return FinishReason.HANDOFF if num_tokens >= self.limit else None
