"""Detokenizes an engine's outputs: whole characters only, cut at stop strings, with log probabilities."""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Annotated

import msgspec

from baton.engine.core.logprobs import Logprobs
from baton.engine.core.messages import EngineOutput, FinishReason
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.speculation.stats import NO_DRAFTS, DraftCounts
from baton.engine.text import TextStream, Tokenizer

from ..serving.timeline import TimelineReport


class ChoicePosition(msgspec.Struct, frozen=True, array_like=True):
    """The number of tokens that were sent of a choice, and their checksum."""

    num_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    checksum: Annotated[int, msgspec.Meta(ge=0)] = 0  # CRC-32 of the tokens' ids
    is_whole: bool = False

    def after(self, tokens: Sequence[int], *, is_whole: bool) -> ChoicePosition:
        """Return the position after further tokens."""
        packed = struct.pack(f"<{len(tokens)}I", *tokens)
        return ChoicePosition(self.num_tokens + len(tokens), zlib.crc32(packed, self.checksum), is_whole)

    def is_after(self, other: ChoicePosition) -> bool:
        """Return whether this position is later in the stream than the other one."""
        return (self.num_tokens, self.is_whole) > (other.num_tokens, other.is_whole)


class LocatedToken(msgspec.Struct, frozen=True, gc=False):
    """A token's log probabilities, and its offset in the choice's text, in characters.

    A whole answer keeps one for each token until its end, so they are excluded from garbage collection (`gc=False`).
    """

    offset: int
    logprobs: Logprobs  # of one position


class ChoiceDelta(msgspec.Struct, frozen=True):
    """Everything that one engine output adds to a choice."""

    text: str = ""
    tokens: list[LocatedToken] = []  # if log probabilities were requested
    token_ids: list[int] = []  # all generated ones, visible or not, if they were requested
    num_tokens: int = 0  # generated ones, visible or not
    token_ends: Sequence[int] = ()  # without log probabilities: the ends of tokens in `text`, except the last one's
    drafts: DraftCounts = NO_DRAFTS
    num_cached_tokens: int = 0  # of the prompt; in the first output's delta
    prompt_logprobs: Logprobs | None = None  # in the first output's delta
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or stop token; None for end-of-sequence
    position: ChoicePosition | None = None  # position after this delta, if the stream is resumable
    timeline: TimelineReport | None = None  # in the last delta, if it was requested

    @property
    def num_logprobs(self) -> int:
        """The number of log probabilities to be written, for tokens and prompt."""
        in_prompt = self.prompt_logprobs.num_values if self.prompt_logprobs is not None else 0
        return in_prompt + (len(self.tokens) * self.tokens[0].logprobs.width if self.tokens else 0)

    @property
    def model_ended(self) -> bool:
        """True if the model itself ended its answer, rather than a limit or a stop string."""
        return self.finish_reason not in (None, "length") and not isinstance(self.stop_reason, str)


class SequenceDetokenizer:
    """Turns the outputs of one sequence into text deltas.

    A token's log probabilities are sent only with the first text after the token's beginning: so clients never get log
    probabilities of text that a stop string removed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        shown: frozenset[int] = frozenset(),
        *,
        returns_token_ids: bool = False,
    ) -> None:
        """`shown` are the special tokens whose text is always kept."""
        self._returns_token_ids = returns_token_ids
        self._params = params
        self._stream = TextStream(tokenizer, params, prompt_token_ids, shown)
        self._waiting: deque[LocatedToken] = deque()
        self._emitted = 0  # characters

    def push(self, output: EngineOutput) -> ChoiceDelta:
        """Return the delta of an output. No output may follow a delta with a finish reason."""
        if self._params.logprobs is None:
            piece = self._stream.push(
                output.token_ids, finished=output.finish_reason is not None, stop_token_id=output.stop_token_id
            )
            text, stop, num_tokens, ends = piece.text, piece.stop, piece.num_tokens, piece.ends
        else:
            (text, stop, num_tokens), ends = self._push_each(output), []
        self._emitted += len(text)
        finish_reason, stop_reason = self._finish(output, stop)
        return ChoiceDelta(
            text=text,
            tokens=self._take_tokens(all=finish_reason is not None and stop is None),
            token_ids=list(output.token_ids[:num_tokens]) if self._returns_token_ids else [],
            num_tokens=num_tokens,
            token_ends=ends,
            drafts=NO_DRAFTS if output.drafts is None else output.drafts.within(num_tokens),
            num_cached_tokens=output.num_cached_tokens,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _push_each(self, output: EngineOutput) -> tuple[str, str | None, int]:
        """Push tokens one by one to record their offsets; return text, stop string and number of tokens."""
        text, last = "", len(output.token_ids) - 1
        hides_last = output.stop_token_id is not None and not self._params.include_stop_str_in_output
        if output.token_ids and (output.logprobs is None or len(output.logprobs) != len(output.token_ids)):
            raise ValueError("tokens without their log probabilities")
        for index, token in enumerate(output.token_ids):
            if output.logprobs is not None and not (hides_last and index == last):
                offset = self._stream.offset_of(token)
                self._waiting.append(LocatedToken(offset, output.logprobs.part(index, index + 1)))
            stop_token_id = output.stop_token_id if index == last else None
            piece = self._stream.push([token], stop_token_id=stop_token_id)
            text += piece.text
            if piece.stop is not None:
                return text, piece.stop, index + 1
        if output.finish_reason is None:
            return text, None, last + 1
        tail = self._stream.push((), finished=True)
        return text + tail.text, tail.stop, last + 1

    def _take_tokens(self, *, all: bool) -> list[LocatedToken]:
        taken = []
        while self._waiting and (all or self._waiting[0].offset < self._emitted):
            taken.append(self._waiting.popleft())
        return taken

    def _finish(self, output: EngineOutput, stop: str | None) -> tuple[str | None, str | int | None]:
        if stop is not None:
            return "stop", stop
        if output.finish_reason is FinishReason.STOP:
            token = output.stop_token_id
            return "stop", token if token in self._params.stop_token_ids else None
        return (output.finish_reason.value if output.finish_reason is not None else None), None
