"""Reads an answer with one choice: its parts (thoughts, text, calls), each with its tokens.

A parser reports the parts of an answer later than their tokens arrive, and without the marks around them:

    tokens          <think>  a  fox  </think>  \\n\\n  the  dog  <tool_call>  ...
    parts                    ReasoningPart             ContentPart  ToolCallStart
    attributed to   ───────── reasoning ─────────────  content ───  neither ─────
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.engine.text import ContentPart, OutputParser, OutputPart, ReasoningPart

from .detokenize import ChoiceDelta, LocatedToken


class AnswerReader:
    """Parses the deltas of one answer into parts, and attributes its tokens to them."""

    def __init__(self, parser: OutputParser, *, has_logprobs: bool) -> None:
        """`has_logprobs`: the deltas have the log probabilities of all tokens."""
        self._parser = parser
        self._attribution = TokenAttribution()
        self._has_logprobs = has_logprobs
        self._length = 0  # of the text up to now

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun."""
        return self._parser.num_calls

    @property
    def is_in_call(self) -> bool:
        """True if the newest call is not complete."""
        return self._parser.is_in_call

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens attributed to reasoning, marks included."""
        return self._attribution.num_reasoning_tokens

    def push(self, delta: ChoiceDelta) -> list[tuple[OutputPart, list[LocatedToken]]]:
        """Return the parts that a delta adds. Parts of the content have their tokens with log probabilities."""
        found: list[tuple[OutputPart, list[LocatedToken]]] = []
        for run in token_runs(delta, self._length, known=self._has_logprobs):
            self._attribution.push(run)
            found += self._attributed(self._parser.push(run.text))
        self._length += len(delta.text)
        if delta.model_ended:
            found += self._attributed(self._parser.push("", finished=True))
        return found

    def _attributed(self, parts: Sequence[OutputPart]) -> Iterator[tuple[OutputPart, list[LocatedToken]]]:
        return zip(parts, self._attribution.take(parts), strict=True)


@dataclass(frozen=True)
class TokenRun:
    """Text that arrived together, and its tokens: one with known log probabilities, or all tokens of a delta."""

    text: str
    num_tokens: int
    token: LocatedToken | None = None


def token_runs(delta: ChoiceDelta, start: int, *, known: bool) -> Iterator[TokenRun]:
    """Yield the text of a delta, cut at the beginnings of its tokens. `start` is its offset in the answer.

    `known`: the log probabilities of the tokens are known, and so are their offsets.
    """
    if not known:
        cuts = [0, *delta.token_ends, len(delta.text)]
        yield from (TokenRun(delta.text[begin:end], min(1, delta.num_tokens)) for begin, end in pairwise(cuts))
        return
    begins = [token.offset - start for token in delta.tokens]
    rest = delta.text[: begins[0]] if begins else delta.text  # the end of a token of an earlier delta
    if rest:
        yield TokenRun(rest, 0)
    for token, (begin, end) in zip(delta.tokens, pairwise([*begins, len(delta.text)]), strict=True):
        yield TokenRun(delta.text[begin:end], 1, token)


class TokenAttribution:
    """Attributes the tokens of one answer to its reasoning and its content."""

    def __init__(self) -> None:
        self.num_reasoning_tokens = 0
        self._text = ""  # text that is not attributed yet
        self._begin = 0  # offset of that text in the answer
        self._runs: deque[tuple[int, TokenRun]] = deque()  # runs of that text, each with its offset
        self._thinks = False

    def push(self, run: TokenRun) -> None:
        self._runs.append((self._begin + len(self._text), run))
        self._text += run.text

    def take(self, parts: Sequence[OutputPart]) -> list[list[LocatedToken]]:
        """Return for each reported part its tokens with log probabilities; only parts of the content have any."""
        return [self._take(part, is_last=number == len(parts)) for number, part in enumerate(parts, 1)]

    def _take(self, part: OutputPart, *, is_last: bool) -> list[LocatedToken]:
        if not isinstance(part, ReasoningPart | ContentPart):
            self._thinks = False
            if is_last:  # the parser does not report the text of a call
                self._advance(len(self._text))
                self._pop(self._begin)
            return []
        # Parts are reported as early as possible, so an equal text before the last occurrence can only be a mark.
        at = self._text.rfind(part.text) if is_last else self._text.find(part.text)
        self._advance(at if at >= 0 else len(self._text))
        before = self._pop(self._begin, whole=True)
        self._advance(len(part.text) if at >= 0 else 0)
        own = self._pop(self._begin)
        is_thought = isinstance(part, ReasoningPart)
        if is_thought or self._thinks:
            self.num_reasoning_tokens += sum(run.num_tokens for run in before)
        if is_thought:
            self.num_reasoning_tokens += sum(run.num_tokens for run in own)
        self._thinks = is_thought
        return [] if is_thought else [run.token for run in own if run.token is not None]

    def _advance(self, length: int) -> None:
        self._text = self._text[length:]
        self._begin += length

    def _pop(self, end: int, *, whole: bool = False) -> list[TokenRun]:
        """Remove and return the runs that begin before `end`; with `whole`, only those that also end before it."""
        passed = []
        while self._runs and self._runs[0][0] < end:
            begin, run = self._runs[0]
            if whole and begin + len(run.text) > end:
                break
            passed.append(self._runs.popleft()[1])
        return passed
