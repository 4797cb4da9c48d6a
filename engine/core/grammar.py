"""The contract between the engine and a grammar library. `engine.structured` implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .sampling import StructuredOutputsParams

ASKED_BY = "structured_outputs"  # the request's field that asks for a grammar


class GrammarRefused(Exception):
    """A grammar that cannot be compiled, or a text that does not match it.

    `reason` continues a sentence that begins with the grammar's name. `place` is the path of the refused part within a
    structural tag, as `.format.elements[0]`. `detail` is for the log: it may name files, which clients must not see.
    """

    def __init__(self, reason: str, place: str = "", detail: str = "") -> None:
        super().__init__(reason)
        self.place = place
        self.detail = detail


class GrammarStats(NamedTuple):
    """Counters since the process started."""

    num_compiled: int = 0
    num_refused: int = 0
    num_hits: int = 0  # lookups answered by the cache, refusals included
    compile_s: float = 0.0  # total time spent on grammars that were compiled or refused


class LookAhead(NamedTuple):
    """Tokens that the grammar allows after an output, one after the other, and the mask after each of them."""

    guesses: Sequence[int]
    masks: Sequence[bytes]  # masks[i] as of `Grammar.advance`: tokens allowed after the output and guesses[: i + 1]


NOT_AHEAD = LookAhead((), ())


class Grammar(Protocol):
    """The grammar of one request's output, with its state. Calls come one at a time, from any thread."""

    def advance(self, token_ids: Sequence[int]) -> bytes:
        """Accept the next tokens of the output. Returns the mask of allowed next tokens: bit t % 32 of int32 t // 32.

        After a complete output, the model's end-of-sequence tokens are allowed. Raises `GrammarRefused` if one of the
        tokens is not allowed, or if no token may follow.
        """
        ...

    def look_ahead(self, guesses: Sequence[int], most: int) -> LookAhead:
        """Return the leading guesses that the grammar allows, up to `most` tokens; the grammar's state stays as it is.

        Where the grammar allows only one text, its tokens replace guesses that are not allowed, or are missing. None of
        the tokens returned ends the output.
        """
        ...


class GrammarSource(Protocol):
    """A source of compiled grammars."""

    def knows(self, asked: StructuredOutputsParams) -> bool:
        """Return whether `open` can answer at once, without the compiler. Any thread may call it."""
        ...

    def open(self, asked: StructuredOutputsParams, is_wanted: Callable[[], bool]) -> Grammar:
        """Return a grammar in its initial state. Any thread may call it. Raises `GrammarRefused`.

        It may take minutes if other grammars are being compiled. Soon after `is_wanted` returns False, it raises some
        exception.
        """
        ...

    def stats(self) -> GrammarStats: ...
