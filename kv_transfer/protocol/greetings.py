"""The holder's half of greetings: readers learn how to reach our memory, and are served for a while.

Some lanes need our CPU: over TCP a read goes on only while we make progress. Whoever greets is about to read, or reads
without a grant that would tell us so (`peers.py`).
"""

from __future__ import annotations

from ..network.channel import Route
from ..ranks.crew import Crew
from .mail import Mail
from .messages import Hello, Unwelcome, Welcome
from .pairing import Pairing

SERVE_AFTER_HELLO_S = 2.0


class Greetings:
    """Times are seconds on the caller's clock."""

    def __init__(self, me: Pairing, crew: Crew, mail: Mail) -> None:
        self._me = me
        self._crew = crew
        self._mail = mail
        self._serve_until = 0.0
        self._round_at = 0.0
        self._answered: set[Route] = set()  # in this round

    def answer(self, route: Route, hello: Hello, now: float) -> None:
        """Once a round: those of hours come at once over a connection that could not be made before."""
        if now != self._round_at:
            self._round_at, self._answered = now, set()
        if route in self._answered:
            return
        self._answered.add(route)
        reason = self._me.objection(hello)
        if reason:
            self._mail.send(route, Unwelcome(hello.to, hello.sender, reason))
            return
        self._serve_until = max(self._serve_until, now + SERVE_AFTER_HELLO_S)
        self._mail.send(route, Welcome(self._me.key, hello.sender, self._crew.metadata))

    def any_lately(self, now: float) -> bool:
        """Someone is to be served for it."""
        return now < self._serve_until
