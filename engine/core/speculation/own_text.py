"""The text of one request, in which a drafter searches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from .drafter import DraftedRequest
from .token_index import SEPARATOR, Match, TokenIndex

_NUM_HASHES = 4096  # enough for 16 384 tokens; more where the prompt is longer


class OwnText:
    """The prompt and the answer so far, and before them the answer that the client predicts.

        end of the prompt, prediction | prompt, answer

    The prediction is written behind the prompt's last tokens, so that it is found where the answer begins.
    """

    __slots__ = ("_answer_start", "_index", "_longest", "_start")

    def __init__(self, request: DraftedRequest, anchors: Sequence[int], longest: int) -> None:
        """`longest`: tokens of the text's end that are searched for."""
        prompt, prediction = request.prompt_token_ids, request.prediction_token_ids
        expected = [*prompt[-longest:], *prediction, SEPARATOR] if prediction else []
        self._index = TokenIndex(anchors, [*expected, *prompt], num_hashes=_NUM_HASHES)
        self._longest = longest
        self._start = len(expected)
        self._answer_start = len(self._index)
        self.extend(request.output_token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._index.extend(token_ids)

    def tail(self) -> array[int]:
        """Return the last tokens."""
        return self._index.part(max(self._start, len(self._index) - self._longest))

    def answer(self, most: int) -> array[int]:
        """Return the last `most` tokens of the answer."""
        return self._index.part(max(self._answer_start, len(self._index) - most))

    def search(self, tail: array[int], enough: int) -> Match | None:
        return self._index.search(tail, enough)

    def following(self, place: int, most: int) -> list[int]:
        return self._index.following(place, most, repeats=True)
