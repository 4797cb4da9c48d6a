"""Circuit breakers: an engine, or a pair of engines, that failed too often gets no requests for a while.

    CLOSED ──too many failures──> OPEN ──open_s later──> HALF_OPEN ──the trial succeeds──> CLOSED
                                   ^                         │
                                   └───────the trial fails───┘

There is one circuit for each engine process, and one for each pair of a prefill process and a decode process that
fetches from it. A circuit opens when enough attempts have failed within a window and they were at least half of all. A
half-open circuit lets one request through, the trial; if that ends without success or failure, the next request becomes
the trial. Requests that an open circuit keeps away go to other engines, if there are any.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Sequence

from pydantic import Field

from baton.cluster.contracts import EngineRecord, EngineView, Role
from baton.engine.strict_model import LONGEST_S, MOST_REQUESTS, StrictModel
from baton.kv_transfer.protocol.messages import EngineKey

from .sliding_window import SlidingWindow

logger = logging.getLogger(__name__)

CircuitKey = tuple[EngineKey, ...]  # one engine; or a prefill engine, and the decode engine that fetches from it
SUCCESSES, FAILURES = 0, 1
IDLE_PERIODS = 10  # a circuit without events for so many times window + pause is forgotten


class BreakerSettings(StrictModel):
    """Settings of circuit breakers, which keep requests away from failing engines and pairs for a while. In seconds."""

    failures: int = Field(
        5, gt=0, le=MOST_REQUESTS
    )  # this many within the window, and at least half of all attempts, open a circuit
    window_s: float = Field(30.0, gt=0, le=LONGEST_S)
    open_s: float = Field(5.0, gt=0, le=LONGEST_S)  # after which one request is let through


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
    """The circuit of one engine, or of one pair."""

    def __init__(self, limits: BreakerSettings, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._state = CircuitState.CLOSED
        self._window = SlidingWindow(limits.window_s, clock)
        self._opened_s = 0.0
        self._trial: object | None = None  # the attempt that a half-open circuit has let through
        self.newest_s = clock()

    def reconfigure(self, limits: BreakerSettings) -> None:
        """Apply other limits. If the window has another length, counting begins anew."""
        if limits.window_s != self._limits.window_s:
            self._window = SlidingWindow(limits.window_s, self._clock)
        self._limits = limits

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

    @property
    def has_trial(self) -> bool:
        """Return whether the half-open circuit waits for the outcome of its trial."""
        return self._trial is not None

    def sent(self, attempt: object) -> None:
        """Note an attempt. Call `left` with it at its end, after `succeeded` or `failed` if its outcome is known."""
        self.newest_s = self._clock()
        if self.state is CircuitState.HALF_OPEN and self._trial is None:
            self._trial = attempt

    def succeeded(self) -> None:
        self._window.add(SUCCESSES)
        if self.state is CircuitState.HALF_OPEN:
            self._move(CircuitEvent.TRIAL_SUCCEEDED)

    def failed(self) -> bool:
        """Count a failure. Return True if it has opened the circuit."""
        self.newest_s = self._clock()
        self._window.add(FAILURES)
        if self.state is CircuitState.HALF_OPEN:
            return self._move(CircuitEvent.TRIAL_FAILED)
        failures = self._window.count(FAILURES)
        many = failures >= self._limits.failures and failures >= self._window.count(SUCCESSES)
        return many and self.state is CircuitState.CLOSED and self._move(CircuitEvent.FAILURES)

    def left(self, attempt: object) -> None:
        """Note that an attempt has ended."""
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
    """All circuits of one gateway. Engines and pairs without recent failures have none."""

    def __init__(
        self,
        limits: BreakerSettings,
        clock: Callable[[], float],
        on_open: Callable[[CircuitKey], None] = lambda key: None,
    ) -> None:
        self._limits, self._clock, self._on_open = limits, clock, on_open
        self._circuits: dict[CircuitKey, Circuit] = {}

    @property
    def num_circuits(self) -> int:
        return len(self._circuits)

    @property
    def num_trials(self) -> int:
        """The number of circuits that wait for the outcome of a trial."""
        return sum(circuit.has_trial for circuit in self._circuits.values())

    def reconfigure(self, limits: BreakerSettings) -> None:
        """Apply other limits, also to open circuits."""
        self._limits = limits
        for circuit in self._circuits.values():
            circuit.reconfigure(limits)

    def sent(self, keys: Iterable[CircuitKey], attempt: object) -> None:
        """Note an attempt in each circuit. Always call `left` with it at its end."""
        for circuit in self._known(keys):
            circuit.sent(attempt)

    def succeeded(self, keys: Iterable[CircuitKey]) -> None:
        for circuit in self._known(keys):
            circuit.succeeded()

    def left(self, keys: Iterable[CircuitKey], attempt: object) -> None:
        for circuit in self._known(keys):
            circuit.left(attempt)

    def failed(self, key: CircuitKey) -> None:
        self._forget_old()
        circuit = self._circuits.get(key) or self._circuits.setdefault(key, Circuit(self._limits, self._clock))
        if circuit.failed():
            names = " and ".join(engine.engine_id for engine in key)
            logger.warning("%s failed too often: gets no requests for %g s", names, self._limits.open_s)
            self._on_open(key)

    def closed_to(self, engines: Sequence[EngineView]) -> set[EngineKey]:
        """Return the engines whose own circuit is open, or whose circuits with all possible decode engines are open."""
        if not self._circuits:
            return set()
        closed = {key[0] for key in self._circuits if len(key) == 1 and self._keeps_away(key)}
        sources = {key[0] for key in self._circuits if len(key) == 2 and self._keeps_away(key)}
        readers = [view.record for view in engines if view.record.role is Role.DECODE]
        for view in engines:
            source = view.record.key
            partners = [reader for reader in readers if reader.fingerprint == view.record.fingerprint]
            if source in sources and all(self._keeps_away((source, partner.key)) for partner in partners):
                closed.add(source)
        return closed

    def closed_from(self, source: EngineRecord) -> set[EngineKey]:
        """Return the decode engines that must not fetch from this engine now."""
        holder = source.key
        return {key[1] for key in self._circuits if len(key) == 2 and key[0] == holder and self._keeps_away(key)}

    def state(self, engine: EngineRecord) -> CircuitState:
        circuit = self._circuits.get((engine.key,))
        return CircuitState.CLOSED if circuit is None else circuit.state

    def _keeps_away(self, key: CircuitKey) -> bool:
        circuit = self._circuits.get(key)
        return circuit is not None and not circuit.lets_through

    def _known(self, keys: Iterable[CircuitKey]) -> list[Circuit]:
        return [circuit for key in keys if (circuit := self._circuits.get(key)) is not None]

    def _forget_old(self) -> None:
        """Drop circuits without recent events, since processes come and go."""
        oldest_s = self._clock() - IDLE_PERIODS * (self._limits.window_s + self._limits.open_s)
        for key in [key for key, circuit in self._circuits.items() if circuit.newest_s < oldest_s]:
            del self._circuits[key]
