"""Prompt lookup: what followed the request's last tokens when they occurred before, in its own prompt and answer.

The longest run of `prompt_lookup_max` down to `prompt_lookup_min` tokens decides, then the newest place. Where a run
occurred more than `token_index.MOST_PLACES` times, the newest of these are looked at, but a run of `prompt_lookup_max`
tokens is always found.

Memory ends with the request: 28 bytes at most for each token of prompt, prediction and answer, and 32 kB.
"""

from __future__ import annotations

from collections.abc import Sequence

from .drafter import DraftedRequest
from .own_text import OwnText
from .token_index import anchors_of


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
        pass  # requests are guessed from their own text only

    def end(self, request_id: str) -> None:
        self._texts.pop(request_id, None)
