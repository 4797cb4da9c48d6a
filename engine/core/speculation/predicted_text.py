"""The answer that a client expects, and the question whether drafts were taken from it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

_TYPE = "i"
_NUM_BYTES = array(_TYPE).itemsize


class PredictedText:
    """The tokens of one prediction. Looking for a run of them takes a microsecond for some thousand tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._packed = array(_TYPE, token_ids).tobytes()

    def contains(self, token_ids: Iterable[int]) -> bool:
        """Return whether these tokens stand in the prediction, one right behind the other."""
        run = array(_TYPE, token_ids).tobytes()
        at = self._packed.find(run)
        while at > 0 and at % _NUM_BYTES:  # it begins within a token
            at = self._packed.find(run, at + 1)
        return at >= 0
