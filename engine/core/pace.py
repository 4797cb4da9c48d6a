"""How long a unit of work takes, as measured lately."""

from __future__ import annotations

KEPT = 0.8  # of what earlier pieces count for, with each further piece
FORGOTTEN_S = 30.0  # a pace that was measured longer ago is none


class Pace:
    """Of work of one kind, of which one piece begins when the one before is over, however early it was asked for."""

    def __init__(self) -> None:
        self._seconds = self._units = 0.0
        self._over_s = self._measured_s = 0.0

    def note(self, asked_s: float, over_s: float, num_units: int) -> None:
        """A piece is over. One of no units only says that the next did not begin before."""
        began_s, self._over_s = max(asked_s, self._over_s), over_s
        if num_units:
            self.add(over_s - began_s, num_units, over_s)

    def add(self, seconds: float, num_units: int, now_s: float) -> None:
        """So many units took so long, as somebody else measured."""
        kept = KEPT if self._is_known(now_s) else 0.0
        self._seconds = self._seconds * kept + seconds
        self._units = self._units * kept + num_units
        self._measured_s = now_s

    def per_unit_s(self, now_s: float) -> float | None:
        """None where nothing was measured lately."""
        return self._seconds / self._units if self._is_known(now_s) else None

    def _is_known(self, now_s: float) -> bool:
        return self._units > 0 and now_s - self._measured_s <= FORGOTTEN_S
