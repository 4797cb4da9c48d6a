"""Text of one output as users see it: detokenized incrementally, and cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.core.sampling import SamplingParams

from .detokenizer import IncrementalDetokenizer
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that some tokens added to an output."""

    text: str
    stop: str | None = None  # the stop string that ended the output; the caller must abort the request
    num_tokens: int = 0  # tokens consumed: fewer than were pushed if a stop string ended the output
    ends: list[int] = field(default_factory=list)  # for each token but the last: offset in `text` where its text ends


class TextStream:
    """Detokenizes one output and looks for stop strings.

    push(tokens) ... push(tokens, finished=True)      deltas add up to the output's text

    The stop token that ends an output is not part of its text, unless `include_stop_str_in_output`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`shown` are special tokens whose text is kept in any case."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, params.skip_special_tokens, shown)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._shows_stop_token = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def offset_of(self, token_id: int) -> int:
        """Return the offset of a token's text if it is pushed next: see `IncrementalDetokenizer.offset_of`."""
        return self._detokenizer.offset_of(token_id)

    def push(self, token_ids: Sequence[int], *, finished: bool = False, stop_token_id: int | None = None) -> TextDelta:
        """Return the text that these tokens add.

        `finished` ends the output: nothing is held back. `stop_token_id` is the last token, if a stop token ended the
        output.
        """
        hides_last = stop_token_id is not None and not self._shows_stop_token
        text, ends = "", list[int]()
        for index, token in enumerate(token_ids):
            if index:
                ends.append(len(text))
            hidden = hides_last and index == len(token_ids) - 1
            self._num_tokens += 1
            delta, stop = self._look(self._detokenizer.push(() if hidden else (token,)))
            text += delta
            if stop is not None:
                return TextDelta(text, stop, index + 1, ends)
        if not finished:
            return TextDelta(text, None, len(token_ids), ends)
        delta, stop = self._look(self._detokenizer.flush())
        return TextDelta(text + delta + self._stops.flush(), stop, len(token_ids), ends)

    def _look(self, text: str) -> tuple[str, str | None]:
        if self._num_tokens <= self._min_tokens:
            return self._stops.pass_unchecked(text), None
        result = self._stops.push(text)
        return result.text, result.stop


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that can be sent, and the stop string that ended the output, if any."""

    text: str
    stop: str | None = None


class StopStrings:
    """Passes text on up to the first stop string, and holds back a possible beginning of one.

    The first stop string is the one that is complete first; if several end at the same character, the longest. So the
    result does not depend on how the text was cut. The work is linear in the text, whatever the length of stop strings.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        """Raise `ValueError` for an empty stop string, which would match everywhere."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._include = include_in_output
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> StopResult:
        """Return the text that can be sent after `text` has arrived; empty after a stop string."""
        if self._stopped:
            return StopResult("")
        if not self._matchers:
            return StopResult(text)
        held = self._held + text
        for index, character in enumerate(text, start=len(self._held)):
            found = [matcher.stop for matcher in self._matchers if matcher.push(character)]
            if found:
                return self._end(held[: index + 1], max(found, key=len))
        keep = max(matcher.matched for matcher in self._matchers)
        self._held = held[len(held) - keep :]
        return StopResult(held[: len(held) - keep])

    def pass_unchecked(self, text: str) -> str:
        """Return `text` and the held text without looking for stop strings: `min_tokens` is not reached yet."""
        text = self.flush() + text
        for matcher in self._matchers:
            matcher.matched = 0
        return text

    def flush(self) -> str:
        """Return the held text, when the output ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, stop: str) -> StopResult:
        self._held, self._stopped = "", True
        return StopResult(text if self._include else text[: len(text) - len(stop)], stop)


class _Matcher:
    """Tracks how much of a stop string the text ends with (the algorithm of Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0]  # [i]: the longest proper prefix of stop that stop[: i + 1] ends with
        for character in stop[1:]:
            self._fallback.append(self._advance(self._fallback[-1], character))

    def push(self, character: str) -> bool:
        """Return True if the stop string is complete."""
        self.matched = self._advance(self.matched, character)
        return self.matched == len(self.stop)

    def _advance(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + 1 if self.stop[matched] == character else 0
