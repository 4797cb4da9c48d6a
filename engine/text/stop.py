"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text to give out now, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Gives out text up to the first stop string, and holds back what may be the beginning of one.

    The first stop string is the one that is complete first; of those that end together, the longest. So the answer does
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
        """What to give out after `text`. Nothing comes after the result that names a stop string."""
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

    def pass_by(self, text: str) -> str:
        """Gives out `text`, and what was held, without looking for stop strings: before `min_tokens` none counts."""
        text = self.flush() + text
        for matcher in self._matchers:
            matcher.matched = 0
        return text

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, stop: str) -> StopResult:
        self._held, self._stopped = "", True
        return StopResult(text if self._include else text[: len(text) - len(stop)], stop)


class _Matcher:
    """Follows one stop string through a text, by Knuth, Morris and Pratt: how much of it the text now ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0]  # [i]: the longest proper prefix of stop that stop[: i + 1] ends with
        for character in stop[1:]:
            self._fallback.append(self._advance(self._fallback[-1], character))

    def push(self, character: str) -> bool:
        """True where the stop string is complete."""
        self.matched = self._advance(self.matched, character)
        return self.matched == len(self.stop)

    def _advance(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + 1 if self.stop[matched] == character else 0
