"""Reasoning: its effort, as chat templates understand it, and the number of tokens that a model spent on it.

A parser reports the parts of an answer later than their tokens arrive, and without the marks around them:

    tokens          <think>  a  fox  </think>  \\n\\n  the  dog  <tool_call>  ...
    parts                    ReasoningPart             ContentPart  ToolCallStart
    attributed to   ───────── reasoning ─────────────  content ───  neither ─────
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from baton.engine.text import ContentPart, OutputPart, ReasoningPart

from ..errors import bad_request
from .detokenize import ChoiceDelta, LocatedToken

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # OpenAI's values

EFFORT = "reasoning_effort"
SEAL = "baton1."  # prefix of signatures that hold thoughts
THINKS = ("enable_thinking", "thinking")  # template variables that switch reasoning on and off


def effort_variables(effort: Effort | None, known: Collection[str]) -> dict[str, Any]:
    """Return the template variables for a reasoning effort; `known` are the variables that the template reads.

    Raises `ApiError` (400) for an effort that the template would ignore. `none` is always accepted for a model that
    does not reason.
    """
    if effort is None:
        return {}
    if EFFORT in known:
        return {EFFORT: effort}
    if effort == "none":
        return {name: False for name in THINKS if name in known}
    told = "whether it thinks at all" if any(name in known for name in THINKS) else "nothing of it"
    message = f"{EFFORT!r} {effort!r} is not supported with this model: its chat template can be told {told}."
    raise bad_request(EFFORT, message, "unsupported_parameter")


def sealed_thoughts(text: str) -> str:
    """Return a signature that holds thoughts whose text is omitted, so that the client can send them back.

    The encoding hides thoughts from display, not from the client. Clients must not decode it: its form may change.
    """
    return SEAL + base64.urlsafe_b64encode(text.encode()).decode()


def opened_thoughts(signature: str) -> str | None:
    """Return the thoughts in a signature; None if it holds none. Raises `ValueError` if it is damaged."""
    if not signature.startswith(SEAL):
        return None
    return base64.b64decode(signature.removeprefix(SEAL), altchars=b"-_", validate=True).decode()


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
