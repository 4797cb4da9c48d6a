"""Text of one output as users see it: detokenized, and cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.core.sampling import SamplingParams

from .detokenizer import IncrementalDetokenizer
from .stop import StopStrings
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that some tokens added to an output."""

    text: str
    stop: str | None = None  # the stop string that ended the output: abort the request
    num_tokens: int = 0  # tokens consumed: fewer than were pushed if a stop string ended the output


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

    @property
    def length(self) -> int:
        """Number of characters decoded so far, including those held back: the text offset of the next token."""
        return self._detokenizer.length

    def push(self, token_ids: Sequence[int], *, finished: bool = False, stop_token_id: int | None = None) -> TextDelta:
        """Return the text that these tokens add.

        `finished` ends the output, so that nothing is held back. `stop_token_id` is the last token if it ended the
        output.
        """
        hides_last = stop_token_id is not None and not self._shows_stop_token
        text = ""
        for index, token in enumerate(token_ids):
            hidden = hides_last and index == len(token_ids) - 1
            self._num_tokens += 1
            delta, stop = self._look(self._detokenizer.push(() if hidden else (token,)))
            text += delta
            if stop is not None:
                return TextDelta(text, stop, index + 1)
        if not finished:
            return TextDelta(text, None, len(token_ids))
        delta, stop = self._look(self._detokenizer.flush())
        return TextDelta(text + delta + self._stops.flush(), stop, len(token_ids))

    def _look(self, text: str) -> tuple[str, str | None]:
        if self._num_tokens <= self._min_tokens:
            return self._stops.pass_unchecked(text), None
        result = self._stops.push(text)
        return result.text, result.stop
