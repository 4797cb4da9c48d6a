"""Which engines, and which pairs of engines, had better be left alone for a while.

    CLOSED ──too many failures──> OPEN ──open_s later──> HALF_OPEN ──the trial succeeds──> CLOSED
                                   ^                         │
                                   └───────the trial fails───┘

A circuit is that of one process, or of a decode process that reads from a prefill process. It opens when, within a
window, so many attempts failed and they were at least half of all. While it is half open it lets one request through;
if that ends without a word about the peer, the next one is the trial. What an open circuit keeps away goes to others,
if there are any.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Sequence

from baton.cluster.contracts import EngineRecord, EngineView, Role

from ..settings import BreakerSettings
from .load import EngineKey, engine_key
from .sliding_window import SlidingWindow

logger = logging.getLogger(__name__)

CircuitKey = tuple[EngineKey, ...]  # one engine; or a prefill engine, and the decode engine that reads from it
SUCCESSES, FAILURES = 0, 1
IDLE_PERIODS = 10  # after which a circuit that nothing was heard of is forgotten


class CircuitState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class CircuitEvent(enum.StrEnum):
    FAILURES = "too many failures"
    TIME = "open_s later"
    TRIAL_SUCCEEDED = "the trial succeeds"
    TRIAL_FAILED = "the trial fails"


_S, _E = CircuitState, CircuitEvent
TRANSITIONS: dict[tuple[CircuitState, CircuitEvent], CircuitState] = {
    (_S.CLOSED, _E.FAILURES): _S.OPEN,
    (_S.OPEN, _E.TIME): _S.HALF_OPEN,
    (_S.HALF_OPEN, _E.TRIAL_SUCCEEDED): _S.CLOSED,
    (_S.HALF_OPEN, _E.TRIAL_FAILED): _S.OPEN,
}


class Circuit:
    """One peer's."""

    def __init__(self, limits: BreakerSettings, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._state = CircuitState.CLOSED
        self._window = SlidingWindow(limits.window_s, clock)
        self._opened_s = 0.0
        self._trial: object | None = None  # the attempt that is let through while it is half open
        self.newest_s = clock()

    @property
    def state(self) -> CircuitState:
        if self._state is CircuitState.OPEN and self._clock() >= self._opened_s + self._limits.open_s:
            self._move(CircuitEvent.TIME)
        return self._state

    @property
    def lets_through(self) -> bool:
        match self.state:
            case CircuitState.CLOSED:
                return True
            case CircuitState.OPEN:
                return False
            case CircuitState.HALF_OPEN:
                return self._trial is None

    def sent(self, attempt: object) -> None:
        """Follow with one of the other three."""
        self.newest_s = self._clock()
        if self.state is CircuitState.HALF_OPEN and self._trial is None:
            self._trial = attempt

    def succeeded(self) -> None:
        self._window.add(SUCCESSES)
        if self.state is CircuitState.HALF_OPEN:
            self._move(CircuitEvent.TRIAL_SUCCEEDED)

    def failed(self) -> bool:
        """Whether it has opened by this."""
        self.newest_s = self._clock()
        self._window.add(FAILURES)
        if self.state is CircuitState.HALF_OPEN:
            return self._move(CircuitEvent.TRIAL_FAILED)
        failures = self._window.count(FAILURES)
        many = failures >= self._limits.failures and failures >= self._window.count(SUCCESSES)
        return many and self.state is CircuitState.CLOSED and self._move(CircuitEvent.FAILURES)

    def left(self, attempt: object) -> None:
        """It ended without saying anything about the peer, or anything more."""
        if self._trial is attempt:
            self._trial = None

    def _move(self, event: CircuitEvent) -> bool:
        self._state = TRANSITIONS[self._state, event]
        self._trial = None
        self._window.clear()
        if self._state is CircuitState.OPEN:
            self._opened_s = self._clock()
        return self._state is CircuitState.OPEN


class Breakers:
    """All circuits of one gateway: of peers that failed lately. Of others it knows nothing, and needs not."""

    def __init__(
        self,
        limits: BreakerSettings,
        clock: Callable[[], float],
        on_open: Callable[[CircuitKey], None] = lambda peer: None,
    ) -> None:
        self._limits, self._clock, self._on_open = limits, clock, on_open
        self._circuits: dict[CircuitKey, Circuit] = {}

    def sent(self, peers: Iterable[CircuitKey], attempt: object) -> None:
        """Call `left` with the same attempt, whatever was said of it meanwhile."""
        for circuit in self._known(peers):
            circuit.sent(attempt)

    def succeeded(self, peers: Iterable[CircuitKey]) -> None:
        for circuit in self._known(peers):
            circuit.succeeded()

    def left(self, peers: Iterable[CircuitKey], attempt: object) -> None:
        for circuit in self._known(peers):
            circuit.left(attempt)

    def failed(self, peer: CircuitKey) -> None:
        self._forget_old()
        circuit = self._circuits.get(peer) or self._circuits.setdefault(peer, Circuit(self._limits, self._clock))
        if circuit.failed():
            names = " and ".join(engine_id for engine_id, _ in peer)
            logger.warning("%s failed too often: asked no more for %g s", names, self._limits.open_s)
            self._on_open(peer)

    def closed_to(self, engines: Sequence[EngineView]) -> set[EngineKey]:
        """Engines that had better get nothing: their own circuit is open, or those to all that could read from them."""
        if not self._circuits:
            return set()
        closed = {peer[0] for peer in self._circuits if len(peer) == 1 and self._keeps_away(peer)}
        prefills = {peer[0] for peer in self._circuits if len(peer) == 2 and self._keeps_away(peer)}
        readers = [view.record for view in engines if view.record.role is Role.DECODE]
        for view in engines:
            record, key = view.record, engine_key(view.record)
            mates = [mate for mate in readers if mate.fingerprint == record.fingerprint]
            if key in prefills and all(self._keeps_away((key, engine_key(mate))) for mate in mates):
                closed.add(key)
        return closed

    def closed_from(self, source: EngineRecord) -> set[EngineKey]:
        """Decode engines that had better not read from this one."""
        key = engine_key(source)
        return {peer[1] for peer in self._circuits if len(peer) == 2 and peer[0] == key and self._keeps_away(peer)}

    def state(self, engine: EngineRecord) -> CircuitState:
        circuit = self._circuits.get((engine_key(engine),))
        return CircuitState.CLOSED if circuit is None else circuit.state

    def _keeps_away(self, peer: CircuitKey) -> bool:
        circuit = self._circuits.get(peer)
        return circuit is not None and not circuit.lets_through

    def _known(self, peers: Iterable[CircuitKey]) -> list[Circuit]:
        return [circuit for peer in peers if (circuit := self._circuits.get(peer)) is not None]

    def _forget_old(self) -> None:
        """Processes come and go."""
        oldest_s = self._clock() - IDLE_PERIODS * (self._limits.window_s + self._limits.open_s)
        for peer in [peer for peer, circuit in self._circuits.items() if circuit.newest_s < oldest_s]:
            del self._circuits[peer]
