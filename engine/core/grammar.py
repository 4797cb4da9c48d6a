"""The contract between the engine and a grammar library. `engine.structured` implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .sampling import StructuredOutputsParams

ASKED_BY = "structured_outputs"  # the field of a request that says what its output must be


class GrammarRefused(Exception):
    """A grammar that cannot be compiled, or a text that does not fit it.

    `reason` continues a sentence that begins with the grammar's name. `place` is the path of the refused part within a
    structural tag, as `.format.elements[0]`. `detail` is for the log: it may name files, which clients must not see.
    """

    def __init__(self, reason: str, place: str = "", detail: str = "") -> None:
        super().__init__(reason)
        self.place = place
        self.detail = detail


class GrammarStats(NamedTuple):
    """Counters from the process's start."""

    num_compiled: int = 0
    num_refused: int = 0
    num_hits: int = 0  # in the cache, refusals included
    compile_s: float = 0.0  # in which grammars were compiled or refused


class LookAhead(NamedTuple):
    """Tokens that may follow an output one after the other, and the masks behind them."""

    guesses: Sequence[int]
    masks: Sequence[bytes]  # as of `Grammar.advance`: of the tokens that may follow the output and guesses[: i + 1]


NOT_AHEAD = LookAhead((), ())


class Grammar(Protocol):
    """The grammar of one request's output, and its state. Calls come one after the other, on any thread."""

    def advance(self, token_ids: Sequence[int]) -> bytes:
        """Accept the next tokens of the output. Returns the mask of allowed next tokens: bit t % 32 of int32 t // 32.

        A complete output may be followed by the model's end-of-sequence tokens. Raises `GrammarRefused` where one of
        the tokens may not come, or none may follow.
        """
        ...

    def look_ahead(self, guesses: Sequence[int], most: int) -> LookAhead:
        """Return the leading guesses that may come next, up to `most` tokens in all; the state stays as it is.

        Tokens of the only text that may come take the place of guesses that may not, or that are not there. None of the
        tokens ends the output.
        """
        ...


class GrammarSource(Protocol):
    """A source of compiled grammars."""

    def knows(self, asked: StructuredOutputsParams) -> bool:
        """Return whether `open` has its answer at once, without a compiler. Any thread may call it."""
        ...

    def open(self, asked: StructuredOutputsParams, is_wanted: Callable[[], bool]) -> Grammar:
        """Return a grammar at the beginning of an output. Any thread may call it. Raises `GrammarRefused`.

        It may take minutes while others compile, too, and fails with any error soon after `is_wanted` returns False.
        """
        ...

    def stats(self) -> GrammarStats: ...
