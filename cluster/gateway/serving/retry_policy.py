"""The retry policy: a table with the consequences of each kind of failed attempt, and the budget for retries.

    attempt fails ──> RETRY_POLICY[failure] ──> the first of its rungs with an engine ──> next attempt
                          │ no rung, or too many attempts       │ no engine: wait, at most capacity_timeout_s
                          └───────────> typed error <───────────┘

docs/operate/reliability.md shows the same table.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.engine.core.messages import EngineError, ErrorKind
from baton.kv_transfer.protocol.messages import EngineKey

from ..routing.sliding_window import SlidingWindow

BUDGET_WINDOW_S = 10.0
REQUESTS, RETRIES = 0, 1


class Rung(enum.StrEnum):
    """The alternatives to serve a request; after a failure, they are tried in the policy's order."""

    ANY = "any"  # the cheapest engine; used for the first attempt
    OTHER_DECODE = "other-decode"  # a decode engine that fetches the KV on offer
    OTHER_PREFILL = "other-prefill"  # a prefill engine that computes all tokens again
    RECOMPUTE = "recompute"  # a decode engine without a queue that computes them, if they are not too many
    UNIFIED = "unified"
    AGAIN = "again"  # the cheapest engine, even one that this request avoids


class Failure(enum.StrEnum):
    """The kinds of failed attempts: `reason` in `x-baton-path` and in the metrics."""

    ENGINE_GONE = "engine-gone"
    ENGINE_LEAVING = "engine-leaving"
    ENGINE_FAILED = "engine-failed"
    KV_LOST = "kv-lost"
    KV_EXPIRED = "kv-expired"
    NO_READER = "no-decode-engine"  # KV is on offer, but no decode engine can fetch it
    OVERLOADED = "overloaded"
    TIMED_OUT = "timed-out"
    INVALID = "invalid"
    TOO_LONG = "too-long"


FAILURE_OF = {
    ErrorKind.ENGINE_DEAD: Failure.ENGINE_GONE,
    ErrorKind.LEAVING: Failure.ENGINE_LEAVING,
    ErrorKind.INTERNAL: Failure.ENGINE_FAILED,
    ErrorKind.KV_LOST: Failure.KV_LOST,
    ErrorKind.KV_EXPIRED: Failure.KV_EXPIRED,
    ErrorKind.OVERLOADED: Failure.OVERLOADED,
    ErrorKind.TIMED_OUT: Failure.TIMED_OUT,
    ErrorKind.INVALID: Failure.INVALID,
    ErrorKind.TOO_LONG: Failure.TOO_LONG,
}


class RetryCharge(enum.StrEnum):
    """Says which further attempts are paid from the gateway's retry budget."""

    ALWAYS = "yes"
    IN_VAIN = "from the second on, if it brought no token"  # one engine's death fails an attempt of many requests
    NEVER = "no"


class Blame(enum.StrEnum):
    """Says which engine this request's next attempts avoid."""

    ENGINE = "the engine"
    HOLDER = "the engine that held the KV"
    REFUSED = "the engine, for good"  # even if no other engine is left: then the request fails at once
    DEPARTED = "the engine, which goes"  # even if no other engine is left: then the request waits for one
    NOBODY = "nobody"


@dataclass(frozen=True)
class RetryRule:
    """The consequences of a failure."""

    rungs: tuple[Rung, ...] = ()  # tried in this order; none: the request is answered with an error
    blame: Blame = Blame.NOBODY
    pays: RetryCharge = RetryCharge.NEVER
    counts: bool = True  # towards `max_attempts`
    max_failures: int | None = None  # limit of this kind in one request; None: only `max_attempts`
    opens_circuit: bool = False  # counts against the circuit of the engine, or of the pair if KV was lost


_DOWN = (Rung.OTHER_PREFILL, Rung.RECOMPUTE, Rung.UNIFIED)

RETRY_POLICY: dict[Failure, RetryRule] = {
    Failure.ENGINE_GONE: RetryRule((*_DOWN, Rung.AGAIN), Blame.ENGINE, RetryCharge.IN_VAIN, opens_circuit=True),
    Failure.ENGINE_FAILED: RetryRule(
        (*_DOWN, Rung.AGAIN), Blame.ENGINE, RetryCharge.IN_VAIN, max_failures=2, opens_circuit=True
    ),
    Failure.ENGINE_LEAVING: RetryRule((*_DOWN, Rung.AGAIN), Blame.DEPARTED, counts=False),
    Failure.KV_LOST: RetryRule((*_DOWN, Rung.AGAIN), Blame.HOLDER, RetryCharge.ALWAYS, opens_circuit=True),
    Failure.KV_EXPIRED: RetryRule((*_DOWN, Rung.AGAIN), pays=RetryCharge.ALWAYS),  # the holder may have it cached
    Failure.NO_READER: RetryRule((Rung.OTHER_DECODE, Rung.RECOMPUTE, Rung.UNIFIED)),
    Failure.OVERLOADED: RetryRule((Rung.OTHER_DECODE, *_DOWN), Blame.REFUSED, RetryCharge.ALWAYS),
    Failure.TIMED_OUT: RetryRule(opens_circuit=True),
    Failure.INVALID: RetryRule(),
    Failure.TOO_LONG: RetryRule(),
}


@dataclass
class AttemptHistory:
    """The failed attempts of one request, and the engines that it avoids."""

    max_attempts: int
    failures: list[Failure] = field(default_factory=list)
    avoided: set[EngineKey] = field(default_factory=set)  # engines that died or lost KV: others are preferred
    refused: set[EngineKey] = field(default_factory=set)  # engines that refused for lack of room: never again
    departed: set[EngineKey] = field(default_factory=set)  # engines that gave it back before their end: never again
    last_error: EngineError | None = None
    was_in_vain: bool = False  # the newest attempt brought no token

    def failed(
        self, error: EngineError, engine: EngineKey, holder: EngineKey | None = None, *, brought_tokens: bool = False
    ) -> Failure:
        """Note a failed attempt in `engine`, which was to fetch KV from `holder` if that is given."""
        failure = FAILURE_OF[error.kind]
        self.failures.append(failure)
        self.last_error = error
        self.was_in_vain = not brought_tokens
        match RETRY_POLICY[failure].blame:
            case Blame.ENGINE:
                self.avoided.add(engine)
            case Blame.HOLDER:
                self.avoided.add(holder or engine)
            case Blame.REFUSED:
                self.refused.add(engine)
            case Blame.DEPARTED:
                self.departed.add(engine)
        return failure

    @property
    def newest_error(self) -> EngineError:
        """Return the error of the newest attempt. Call it only after a failure."""
        assert self.last_error is not None
        return self.last_error

    @property
    def may_go_on(self) -> bool:
        """Return True if another attempt may follow the newest failure.

        Their number is limited, so that a request that makes engines fail does not make all of them fail.
        """
        newest = self.failures[-1]
        rule = RETRY_POLICY[newest]
        if rule.max_failures is not None and self.failures.count(newest) >= rule.max_failures:
            return False
        return bool(rule.rungs) and self._num_counted < self.max_attempts

    @property
    def must_pay(self) -> bool:
        """Return True if the next attempt must be paid from the retry budget."""
        pays = RETRY_POLICY[self.failures[-1]].pays
        was_in_vain = pays is RetryCharge.IN_VAIN and self.was_in_vain and self._num_counted > 1
        return pays is RetryCharge.ALWAYS or was_in_vain

    @property
    def _num_counted(self) -> int:
        return sum(RETRY_POLICY[failure].counts for failure in self.failures)


class RetryBudget:
    """Limits retries within `BUDGET_WINDOW_S` seconds to `least`, or to the share `ratio` of the requests.

    Counted are the requests that began in this time, or the running ones if they are more, since an answer may take
    minutes. Otherwise its own gateways' retries could overload a fleet in trouble.
    """

    def __init__(self, ratio: float, least: int, clock: Callable[[], float]) -> None:
        self._ratio = ratio
        self._least = least
        self._window = SlidingWindow(BUDGET_WINDOW_S, clock)
        self.num_running = 0

    def reconfigure(self, ratio: float, least: int) -> None:
        self._ratio, self._least = ratio, least

    def began(self) -> None:
        """Count a request. After each call, call `ended` once."""
        self.num_running += 1
        self._window.add(REQUESTS)

    def ended(self) -> None:
        self.num_running -= 1

    @property
    def left(self) -> int:
        """Return how many retries may be made now."""
        num_requests = max(self._window.count(REQUESTS), self.num_running)
        return max(0, max(self._least, int(self._ratio * num_requests)) - self._window.count(RETRIES))

    def spend(self) -> None:
        self._window.add(RETRIES)
