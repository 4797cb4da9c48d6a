"""Grammars of token ids, for models of 256 tokens without text: twelve tokens may follow, drawn from those before."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from baton.engine import StructuredOutputsParams
from baton.engine.core.grammar import GrammarStats, LookAhead
from baton.engine.core.messages import EngineRequest

EOS = 2


def allowed_after(tokens: Sequence[int]) -> set[int]:
    """Return the tokens that may follow: any at first, then twelve, after ten also the end, and at last only that."""
    if not tokens:
        return set(range(256))
    allowed = set(random.Random(str(list(tokens))).sample(range(3, 256), 12))
    if len(tokens) <= 10:
        return allowed
    return {EOS} | (allowed if len(tokens) < 30 else set())


class NarrowGrammar:
    def __init__(self) -> None:
        self._tokens: list[int] = []

    def advance(self, token_ids: Sequence[int]) -> bytes:
        for token in token_ids:
            assert token in allowed_after(self._tokens), "drawn from outside of the mask"
            self._tokens.append(token)
        return _mask(self._tokens)

    def look_ahead(self, guesses: Sequence[int], most: int) -> LookAhead:
        found: list[int] = []
        for guess in guesses[:most]:
            if guess == EOS or guess not in allowed_after([*self._tokens, *found]):
                break
            found.append(guess)
        return LookAhead(found, [_mask([*self._tokens, *found[: i + 1]]) for i in range(len(found))])


def _mask(tokens: Sequence[int]) -> bytes:
    return sum(1 << token for token in allowed_after(tokens)).to_bytes(32, "little")


class NarrowGrammars:
    """Implements `GrammarSource`."""

    def knows(self, asked: StructuredOutputsParams) -> bool:
        return True

    def open(self, asked: StructuredOutputsParams, is_wanted: Callable[[], bool]) -> NarrowGrammar:
        return NarrowGrammar()

    def stats(self) -> GrammarStats:
        return GrammarStats()


def with_grammars(requests: list[EngineRequest]) -> list[EngineRequest]:
    """Give every other request a grammar."""
    replace = msgspec.structs.replace
    grammar = {"structured_outputs": StructuredOutputsParams(regex="x"), "min_tokens": 0, "ignore_eos": False}
    grammar |= {"allowed_token_ids": None, "bad_words_token_ids": [], "stop_token_ids": []}  # could exclude all
    return [
        replace(each, sampling=replace(each.sampling, **grammar)) if i % 2 else each for i, each in enumerate(requests)
    ]
