"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that can be sent, and the stop string that ended it, if any."""

    text: str
    stop: str | None = None


class StopStrings:
    """Passes text on up to the first stop string, and holds back a possible beginning of one.

    The first stop string is the one that is complete first; of those that end together, the longest. So the result does
    not depend on how the text was cut. Work is proportional to the text, however long the stop strings are.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        """Raises `ValueError` for an empty stop string, which would match everywhere."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._include = include_in_output
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> StopResult:
        """Return the text that can be sent after `text` has arrived; empty after a stop string."""
        if self._stopped:
            return StopResult("")
        if not self._matchers:
            return StopResult(text)
        held = self._held + text
        for index, character in enumerate(text, start=len(self._held)):
            found = [matcher.stop for matcher in self._matchers if matcher.push(character)]
            if found:
                return self._end(held[: index + 1], max(found, key=len))
        keep = max(matcher.matched for matcher in self._matchers)
        self._held = held[len(held) - keep :]
        return StopResult(held[: len(held) - keep])

    def pass_unchecked(self, text: str) -> str:
        """Return `text`, and what was held back, without looking for stop strings: `min_tokens` is not reached yet."""
        text = self.flush() + text
        for matcher in self._matchers:
            matcher.matched = 0
        return text

    def flush(self) -> str:
        """Return what was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, stop: str) -> StopResult:
        self._held, self._stopped = "", True
        return StopResult(text if self._include else text[: len(text) - len(stop)], stop)


class _Matcher:
    """Tracks how much of one stop string the text ends with, by the algorithm of Knuth, Morris and Pratt."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0]  # [i]: the longest proper prefix of stop that stop[: i + 1] ends with
        for character in stop[1:]:
            self._fallback.append(self._advance(self._fallback[-1], character))

    def push(self, character: str) -> bool:
        """Return True if the stop string is complete."""
        self.matched = self._advance(self.matched, character)
        return self.matched == len(self.stop)

    def _advance(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + 1 if self.stop[matched] == character else 0
