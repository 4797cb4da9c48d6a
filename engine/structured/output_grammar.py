"""The grammar of one output: masks of the tokens that may come next, and after draft tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..core.grammar import GrammarRefused, LookAhead

if TYPE_CHECKING:
    import xgrammar

TokenMask = NDArray[np.int32]  # token t is allowed if bit t % 32 of word t // 32 is set

QUICK_MASK_S = 0.0002  # look-ahead stops when a mask takes longer; most take some microseconds
_MOST_WORDS = 64  # masks with more non-zero words are not searched for a forced token


class OutputGrammar:
    """Implements `engine.core.grammar.Grammar`."""

    def __init__(
        self,
        matcher: xgrammar.GrammarMatcher,
        vocab_size: int,
        token_bytes: Callable[[], list[bytes]],
        allowed: TokenMask | None = None,
    ) -> None:
        """`token_bytes` returns the text of each token. `allowed`, if given, further restricts every mask."""
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._token_bytes = token_bytes
        self._allowed = allowed
        self._words = np.zeros(self._num_words, np.int32)  # the latest mask
        self._mask_s = 0.0  # CPU time that the latest mask took

    def advance(self, token_ids: Sequence[int]) -> bytes:
        """Implement `Grammar.advance`."""
        for token_id in token_ids:
            if not self._matcher.accept_token(token_id):
                raise GrammarRefused(f"does not allow token {token_id}: the output was begun under another grammar")
        self._fill_mask()
        if not self._words.any():
            raise GrammarRefused("lets no token of the vocabulary follow")
        return self._words.tobytes()

    def look_ahead(self, guesses: Sequence[int], most: int) -> LookAhead:
        """Implement `Grammar.look_ahead`."""
        found: list[int] = []
        masks: list[bytes] = []
        first_words, first_mask_s, guesses_fit = self._words, self._mask_s, True
        try:
            while len(found) < most and self._mask_s < QUICK_MASK_S:
                guess = guesses[len(found)] if guesses_fit and len(found) < len(guesses) else None
                if guess is None or not self._allows(guess):
                    guesses_fit, guess = False, self._only_continuation()
                if guess is None or not self._matcher.accept_token(guess):
                    break
                found.append(guess)
                if self._matcher.is_terminated():
                    break
                self._fill_mask()
                if not self._words.any():
                    break
                masks.append(self._words.tobytes())
        finally:
            self._matcher.rollback(len(found))
            self._words, self._mask_s = first_words, first_mask_s
        return LookAhead(found[: len(masks)], masks)

    def _fill_mask(self) -> None:
        begin_s = time.thread_time()
        words = np.full((1, self._num_words), -1, np.int32)
        self._matcher.fill_next_token_bitmask(words)
        if self._allowed is not None:
            words &= self._allowed
        self._words = words[0].astype("<i4", copy=False)
        self._mask_s = time.thread_time() - begin_s

    def _allows(self, token_id: int) -> bool:
        return bool(self._words[token_id >> 5] >> (token_id & 31) & 1)

    def _only_continuation(self) -> int | None:
        """Return the longest token of the forced text, if the grammar allows only one text next; otherwise None.

        A token that extends beyond the forced text is returned only if no other token does.
        """
        try:
            text = self._matcher.find_jump_forward_string().encode()
        except UnicodeDecodeError:  # xgrammar 0.2.8 fails if the forced text begins or ends within a character
            return None
        if not text:
            return None
        pieces = self._token_bytes()
        tokens = [token for token in self._allowed_tokens() if token < len(pieces)]
        beyond = [token for token in tokens if len(pieces[token]) > len(text)]
        within = [token for token in tokens if len(pieces[token]) <= len(text)]
        if len(beyond) == 1:
            return beyond[0]
        longest = max(within, key=lambda token: len(pieces[token]), default=None)
        ends_open = bool(beyond) and longest is not None and len(pieces[longest]) == len(text)
        return None if ends_open else longest

    def _allowed_tokens(self) -> list[int]:
        """Return the tokens that the latest mask allows; [] if more than `_MOST_WORDS` of its words are non-zero."""
        numbers = np.flatnonzero(self._words)
        if len(numbers) > _MOST_WORDS:
            return []
        bits = np.unpackbits(self._words[numbers].view(np.uint8), bitorder="little").reshape(-1, 32)
        words, places = bits.nonzero()
        tokens: list[int] = (32 * numbers[words] + places).tolist()
        return tokens
