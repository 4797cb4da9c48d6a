"""Where brackets that have been opened are closed, in text that arrives in pieces."""

from __future__ import annotations


class Nesting:
    """Follows JSON, or what is like it: one bracket, and what is in it."""

    def __init__(self, quotes: str = '"', *, begin: int = 0) -> None:
        """`quotes` are what strings stand in; `begin` is where `end_of` begins."""
        self._quotes = quotes
        self._depth = 0
        self._quote = ""  # that has been opened
        self._escaped = False
        self._seen = begin  # characters that `end_of` need not look at

    def end_in(self, text: str) -> int | None:
        """Behind the last bracket; None where that is still to come."""
        for at, character in enumerate(text):
            if self._quote:
                if character == self._quote and not self._escaped:
                    self._quote = ""
                self._escaped = not self._escaped and character == "\\"
            elif character in self._quotes:
                self._quote = character
            elif character in "{[(":
                self._depth += 1
            elif character in "}])":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None

    def end_of(self, text: str) -> int | None:
        """The same for text that is all there is: it begins with what it was the last time."""
        end = self.end_in(text[self._seen :])
        if end is None:
            self._seen = len(text)
            return None
        return self._seen + end
