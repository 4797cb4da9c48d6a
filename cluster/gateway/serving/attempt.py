"""An attempt: a sequence in one engine. Its outcome updates load records and circuits."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from baton.cluster.contracts import EngineClient, EngineRecord, OutputStream
from baton.engine.core.messages import EngineError, EngineRequest, ErrorKind, KVSource

from ..routing.breaker import Breakers, CircuitKey
from ..routing.load import LoadTracker, Placement
from .retry_policy import RETRY_POLICY, Blame, Failure

MIN_TIMEOUT_S = 0.001  # because 0 would mean no deadline
REFUSALS = (ErrorKind.OVERLOADED, ErrorKind.INVALID, ErrorKind.TOO_LONG)  # errors that cost no device time


@dataclass
class Attempt:
    """One attempt, from its submission until it is closed."""

    placement: Placement
    stream: OutputStream
    sent_s: float  # on `time.monotonic`'s clock, before the engine can have received it
    holder: EngineRecord | None = None  # the engine whose KV this one fetches
    kv_source: KVSource | None = None  # the KV to fetch
    has_output: bool = False  # if so, the engine has computed or fetched the prompt
    has_run: bool = True  # device time was spent, or may have been

    @property
    def engine(self) -> EngineRecord:
        return self.placement.engine

    @property
    def circuit(self) -> CircuitKey:
        return (self.engine.key,)

    @property
    def pair_circuit(self) -> CircuitKey | None:
        return None if self.holder is None else (self.holder.key, self.engine.key)

    @property
    def circuits(self) -> list[CircuitKey]:
        return [self.circuit] if self.pair_circuit is None else [self.circuit, self.pair_circuit]

    def fetches(self, source: KVSource) -> bool:
        return self.kv_source is not None and self.kv_source.ticket == source.ticket

    def note_error(self, error: EngineError, *, was_scheduled: bool) -> None:
        """Decide whether device time was spent. `was_scheduled`: the engine has reported that it had begun."""
        waited_only = error.kind is ErrorKind.TIMED_OUT and not was_scheduled
        self.has_run = self.has_output or not (waited_only or error.kind in REFUSALS)


@dataclass(frozen=True)
class KVOffer:
    """KV that a finished prefill keeps until a decode engine has fetched it or the offer is withdrawn."""

    engine: EngineRecord
    source: KVSource


@dataclass(frozen=True)
class Deadline:
    """The time after which nobody needs an answer any more."""

    at_s: float = math.inf  # on the event loop's clock
    by_client: bool = False  # the client has set it, so missing it is no fault of an engine

    @property
    def left_s(self) -> float:
        return self.at_s - asyncio.get_running_loop().time()

    @property
    def is_over(self) -> bool:
        return self.left_s <= MIN_TIMEOUT_S

    def on(self, request: EngineRequest) -> EngineRequest:
        """Return the request with the time left as of now, since the clocks of machines differ."""
        if self.at_s == math.inf:
            return request
        return msgspec.structs.replace(request, timeout_s=max(MIN_TIMEOUT_S, self.left_s))


class AttemptTracker:
    """Opens and closes the attempts of one gateway. Each opened attempt must be closed."""

    def __init__(
        self,
        client: EngineClient,
        loads: LoadTracker,
        breakers: Breakers,
        on_decision: Callable[[Failure, float], None],
    ) -> None:
        """`on_decision` gets the seconds from a failed engine's last message to the decision that it has failed."""
        self._client = client
        self._loads = loads
        self._breakers = breakers
        self._on_decision = on_decision

    def open(self, placement: Placement, request: EngineRequest, holder: EngineRecord | None = None) -> Attempt:
        """Submit a request to an engine. `holder` is the engine whose KV it fetches, if `kv_source` is given."""
        self._loads.sent(placement)
        sent_s = time.monotonic()
        stream = self._client.submit(placement.engine, request)
        attempt = Attempt(placement, stream, sent_s, holder, request.kv_source)
        self._breakers.sent(attempt.circuits, attempt)
        return attempt

    def note_first_output(self, attempt: Attempt) -> None:
        attempt.has_output = True
        self._loads.first_token(attempt.placement)
        self._breakers.succeeded(attempt.circuits)

    def note_failure(self, attempt: Attempt, failure: Failure, deadline: Deadline) -> None:
        """Count a failed attempt against the circuit of its engine, or of the pair if a hand-off failed."""
        rule = RETRY_POLICY[failure]
        blamed = {Blame.ENGINE: attempt.engine, Blame.HOLDER: attempt.holder or attempt.engine}.get(rule.blame)
        if blamed is not None:
            self._on_decision(failure, time.monotonic() - max(attempt.sent_s, self._client.last_message_s(blamed)))
        if not rule.opens_circuit:
            return
        if failure is Failure.TIMED_OUT and (attempt.has_output or deadline.by_client):
            return
        pair = attempt.pair_circuit if failure in (Failure.KV_LOST, Failure.TIMED_OUT) else None
        self._breakers.failed(pair or attempt.circuit)

    async def close(self, attempt: Attempt) -> None:
        """End the attempt, and abort it in the engine unless its last output has arrived."""
        self._breakers.left(attempt.circuits, attempt)
        (self._loads.ended if attempt.has_output else self._loads.given_up)(attempt.placement)
        await attempt.stream.aclose()
