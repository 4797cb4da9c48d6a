"""A sequence in one engine, and what the loads and the circuits keep of it."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

import msgspec

from baton.cluster.contracts import EngineClient, EngineRecord, OutputStream
from baton.engine.core.messages import EngineError, EngineRequest, ErrorKind

from ..routing.breaker import Breakers, CircuitKey
from ..routing.load import LoadTracker, Placement, engine_key
from .retry_policy import RETRY_POLICY, Failure

MIN_TIMEOUT_S = 0.001  # 0 would be none
REFUSALS = (ErrorKind.OVERLOADED, ErrorKind.INVALID, ErrorKind.TOO_LONG)  # no time was spent on these


@dataclass
class Attempt:
    placement: Placement
    stream: OutputStream
    sent_s: float  # by `time.monotonic`, no later than the engine can have it
    holder: EngineRecord | None = None  # whose KV it reads
    is_read: bool = False  # the engine has read the prompt
    has_run: bool = True  # as far as anyone knows here

    @property
    def engine(self) -> CircuitKey:
        return (engine_key(self.placement.engine),)

    @property
    def pair(self) -> CircuitKey | None:
        return None if self.holder is None else (engine_key(self.holder), *self.engine)

    @property
    def peers(self) -> list[CircuitKey]:
        return [self.engine] if self.pair is None else [self.engine, self.pair]


@dataclass(frozen=True)
class Deadline:
    """From when on nobody waits for a sequence."""

    at_s: float = math.inf  # the event loop's time
    is_clients: bool = False  # then it says nothing of the engines that do not meet it

    @property
    def left_s(self) -> float:
        return self.at_s - asyncio.get_running_loop().time()

    @property
    def is_over(self) -> bool:
        return self.left_s <= MIN_TIMEOUT_S

    def on(self, request: EngineRequest) -> EngineRequest:
        """The request as it is sent now: with what is left, since clocks of machines differ."""
        if self.at_s == math.inf:
            return request
        return msgspec.structs.replace(request, timeout_s=max(MIN_TIMEOUT_S, self.left_s))


class AttemptTracker:
    """Of one sequence. Each attempt that is opened must be closed."""

    def __init__(self, client: EngineClient, loads: LoadTracker, breakers: Breakers, deadline: Deadline) -> None:
        self.gpu_time_spent = False  # by one that is closed; or may have been
        self._client = client
        self._loads = loads
        self._breakers = breakers
        self.deadline = deadline

    def open(self, placement: Placement, request: EngineRequest, holder: EngineRecord | None = None) -> Attempt:
        """`holder`: of the KV that the engine is to read."""
        self._loads.sent(placement)
        sent_s = time.monotonic()
        attempt = Attempt(placement, self._client.submit(placement.engine, self.deadline.on(request)), sent_s, holder)
        self._breakers.sent(attempt.peers, attempt)
        return attempt

    def spoke(self, attempt: Attempt) -> None:
        """Its first token came: the engine has read the prompt."""
        attempt.is_read = True
        self._loads.read(attempt.placement)
        self._breakers.succeeded(attempt.peers)

    def failed(self, attempt: Attempt, error: EngineError, *, was_scheduled: bool) -> None:
        """`was_scheduled`: the engine says that it had begun."""
        waited_only = error.kind is ErrorKind.TIMED_OUT and not was_scheduled
        attempt.has_run = attempt.is_read or not (waited_only or error.kind in REFUSALS)

    def judge(self, attempt: Attempt, failure: Failure) -> None:
        """What a failed attempt says of its engine, or of the pair that was to hand over."""
        if not RETRY_POLICY[failure].breaks:
            return
        if failure is Failure.TIMED_OUT and (attempt.is_read or self.deadline.is_clients):
            return
        pair = attempt.pair if failure in (Failure.KV_LOST, Failure.TIMED_OUT) else None
        self._breakers.failed(pair or attempt.engine)

    async def close(self, attempt: Attempt) -> None:
        self.gpu_time_spent |= attempt.has_run
        self._breakers.left(attempt.peers, attempt)
        (self._loads.ended if attempt.is_read else self._loads.given_up)(attempt.placement)
        await attempt.stream.aclose()
