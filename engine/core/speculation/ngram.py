"""Prompt lookup: guesses are the tokens that followed when the request's last tokens occurred earlier in its text.

The text is the request's prompt and answer. The longest match of `prompt_lookup_max` down to `prompt_lookup_min` tokens
wins; of equal ones, the newest. If a match occurs more than `token_index.MOST_PLACES` times, only the newest places are
looked at, but a match of `prompt_lookup_max` tokens is always found.

The scheduler's thread indexes a text when the request gets its first drafts, and 1000 tokens take it 0.4 ms. So of a
longer text only the last `MOST_INDEXED` tokens are searched, and of a prediction the first ones.

Memory, until the request ends: at most 28 bytes for each token of prompt, prediction and answer, and 32 kB.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from .drafter import DraftedRequest
from .token_index import SEPARATOR, Match, TokenIndex, anchors_of

MOST_INDEXED = 2**17  # tokens of prompt and answer when drafts begin, and of a prediction
_NUM_HASHES = 4096  # enough for 16 384 tokens; a longer prompt gets more


class OwnText:
    """The text of a request: its prompt and answer so far, and before them the answer that the client predicts.

        end of the prompt, prediction | prompt, answer

    The prediction follows a copy of the prompt's last tokens, so that it is found when the answer begins.
    """

    __slots__ = ("_answer_start", "_index", "_longest", "_start")

    def __init__(self, request: DraftedRequest, anchors: Sequence[int], longest: int) -> None:
        """Create the text of a request. `longest`: how many of its last tokens are searched for."""
        prompt, answer = request.prompt_token_ids[-MOST_INDEXED:], request.output_token_ids[-MOST_INDEXED:]
        text, prediction = [*prompt, *answer][-MOST_INDEXED:], request.prediction_token_ids[:MOST_INDEXED]
        expected = [*prompt[-longest:], *prediction, SEPARATOR] if prediction else []
        self._index = TokenIndex(anchors, [*expected, *text], num_hashes=_NUM_HASHES)
        self._longest = longest
        self._start = len(expected)
        self._answer_start = len(self._index) - len(answer)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._index.extend(token_ids)

    def tail(self) -> array[int]:
        """Return the last tokens, which are to be searched for."""
        return self._index.part(max(self._start, len(self._index) - self._longest))

    def answer(self, most: int) -> array[int]:
        """Return the last `most` tokens of the answer."""
        return self._index.part(max(self._answer_start, len(self._index) - most))

    def search(self, tail: array[int], enough: int) -> Match | None:
        return self._index.search(tail, enough)

    def following(self, place: int, most: int) -> list[int]:
        return self._index.following(place, most, repeats=True)


class NgramDrafter:
    """Guesses from the request's own text. Implements `Drafter`."""

    def __init__(self, lookup_min: int, lookup_max: int) -> None:
        self._anchors = anchors_of(lookup_min, lookup_max)
        self._longest = lookup_max
        self._texts: dict[str, OwnText] = {}

    def start(self, request: DraftedRequest) -> None:
        self._texts[request.request_id] = OwnText(request, self._anchors, self._longest)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        if (text := self._texts.get(request_id)) is not None:
            text.extend(token_ids)

    def propose(self, request_id: str, most: int) -> list[int]:
        text = self._texts.get(request_id)
        match = None if text is None else text.search(text.tail(), enough=1)
        return [] if text is None or match is None else text.following(match.places[0], most)

    def learn(self, answer: Sequence[int], cache_salt: str) -> None:
        pass  # requests are guessed only from their own text

    def end(self, request_id: str) -> None:
        self._texts.pop(request_id, None)
