"""Parser of reasoning: the text between `<think>` and `</think>` before an answer.

START ──<think>──> THINKING ──</think>──> BETWEEN ──not a blank──> ANSWERING
  └── anything else: there is no reasoning ──────────────────────────^
"""

from __future__ import annotations

from enum import Enum, auto

from .incremental import undecided_suffix
from .tool_call_format import GrammarSpec

BEGIN, END = "<think>", "</think>"


class ReasoningStart(Enum):
    """State of the reasoning when an answer begins."""

    NONE = auto()
    POSSIBLE = auto()  # the answer may begin with reasoning
    BEGUN = auto()  # the prompt ends within reasoning


def after_reasoning(answer: GrammarSpec, reasoning: ReasoningStart) -> GrammarSpec:
    """Return the grammar of an answer that may have reasoning before it."""
    begin = {ReasoningStart.NONE: None, ReasoningStart.POSSIBLE: BEGIN, ReasoningStart.BEGUN: ""}[reasoning]
    if begin is None:
        return answer
    before = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": END}
    blanks = {"type": "regex", "pattern": "\\n{0,2}"}
    behind = {"type": "sequence", "elements": [before, blanks, answer]}
    return behind if reasoning is ReasoningStart.BEGUN else {"type": "or", "elements": [answer, behind]}


class _State(Enum):
    START = auto()
    THINKING = auto()
    BETWEEN = auto()
    ANSWERING = auto()


_FIRST = {
    ReasoningStart.NONE: _State.ANSWERING,
    ReasoningStart.POSSIBLE: _State.START,
    ReasoningStart.BEGUN: _State.THINKING,
}


class ReasoningParser:
    """Separates reasoning from the answer. Blanks around reasoning belong to neither."""

    def __init__(self, reasoning: ReasoningStart) -> None:
        self._state = _FIRST[reasoning]
        self._held = ""
        self._has_reasoning = False

    def push(self, text: str, *, finished: bool = False) -> tuple[str, str]:
        """Return the text that `text` adds to the reasoning and to the answer. `finished`: no text follows."""
        self._held += text
        if self._state is _State.START:
            self._look_for_reasoning(finished)
        reasoning = self._push_reasoning(finished) if self._state is _State.THINKING else ""
        if self._state is _State.BETWEEN:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.ANSWERING
        return reasoning, self._take(len(self._held)) if self._state is _State.ANSWERING else ""

    def _look_for_reasoning(self, finished: bool) -> None:
        text = self._held.lstrip()
        if text.startswith(BEGIN):
            self._held, self._state = text[len(BEGIN) :], _State.THINKING
        elif finished or not BEGIN.startswith(text):
            self._state = _State.ANSWERING

    def _push_reasoning(self, finished: bool) -> str:
        if not self._has_reasoning:
            self._held = self._held.lstrip()
        at = self._held.find(END)
        if at >= 0:
            reasoning = self._take(at).rstrip()
            self._held, self._state = self._held[len(END) :], _State.BETWEEN
            return reasoning
        reasoning = self._take(len(self._held) - (0 if finished else undecided_suffix(self._held, END)))
        self._has_reasoning = self._has_reasoning or bool(reasoning)
        return reasoning

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken
