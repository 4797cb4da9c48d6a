"""One sequence on its way through the engines, and what happens when one of them fails.

    route ──> prefill (keep_kv) ── first token, HANDOFF ──> decode (kv_source) ── tokens ──> done
      ^  └──> unified or decode engine, does it all ─────────────────────────── tokens ──> done
      └────── engine gone, KV lost, overloaded: all tokens so far, generation + 1, same seed

Random draws depend on seed and position only, so whoever continues draws what the lost engine would have drawn: the
stream has no gap and no repetition.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec

from baton.cluster.contracts import EngineClient, EngineGone, EngineRecord, OutputStream
from baton.engine.core.messages import EngineError, EngineOutput, EngineRequest, ErrorKind, FinishReason, KVSource

from .errors import from_engine, internal, no_capacity
from .ledger import EngineKey, Placement, engine_key
from .metrics import GatewayMetrics
from .ranks import only_with
from .router import Path, Route, Router, num_tokens
from .settings import GatewaySettings

logger = logging.getLogger(__name__)

POLL_S = 0.02  # between looks for an engine that can take a request, while there is none

RETRIED = {
    ErrorKind.ENGINE_DEAD: "engine-gone",
    ErrorKind.KV_LOST: "kv-lost",
    ErrorKind.OVERLOADED: "overloaded",
    ErrorKind.INTERNAL: "engine-failed",  # once: most of those that share a batch with the culprit are innocent
}


@dataclass
class _Leg:
    """The sequence in one engine."""

    placement: Placement
    stream: OutputStream
    is_read: bool = False  # the engine has read the prompt


@dataclass(frozen=True)
class _Offer:
    """KV that a finished prefill holds for us until a decode engine has it."""

    engine: EngineRecord
    source: KVSource


class Dispatcher:
    """Sends sequences to engines."""

    def __init__(
        self, client: EngineClient, router: Router, settings: GatewaySettings, metrics: GatewayMetrics
    ) -> None:
        self.client = client
        self.router = router
        self.settings = settings
        self.metrics = metrics

    def dispatch(self, request: EngineRequest, *, rank: int | None = None, session_id: str | None = None) -> Dispatch:
        """`rank`: an engine that must take part, whatever happens. `session_id`: requests that had best meet."""
        return Dispatch(self, request, rank, session_id)

    def is_ready(self) -> bool:
        """Whether some path through the engines exists now."""
        return any(view.record.role.writes_answers for view in self.client.engines())


class Dispatch:
    """One sequence. `path` and `reason` are final once the first output is there.

    At any time it has at most one leg, and at most one offer, which ends with the decode engine's first word.
    """

    def __init__(
        self, dispatcher: Dispatcher, request: EngineRequest, rank: int | None, session_id: str | None
    ) -> None:
        self.path = Path.UNIFIED
        self.reason = ""
        self._client = dispatcher.client
        self._router = dispatcher.router
        self._settings = dispatcher.settings
        self._metrics = dispatcher.metrics
        self._request = request
        self._pinned_rank = rank
        self._wanted = self._router.read(request, session_id=session_id, pinned_rank=rank)
        self._tokens = list(request.output_token_ids)  # so far, by whichever engine
        self._generation = request.generation
        self._leg: _Leg | None = None
        self._offer: _Offer | None = None
        self._failures: list[EngineError] = []
        self._lost: set[EngineKey] = set()  # engines that died or whose KV could not be fetched: rather others
        self._full: set[EngineKey] = set()  # engines that refused for lack of room: not again

    async def outputs(self) -> AsyncGenerator[EngineOutput, None]:
        """Outputs of whichever engines serve the sequence, as if they were one. Closing it ends every leg.

        Raises `ApiError` for what no engine could make good.
        """
        try:
            while True:
                leg = self._leg or await self._wait_for_leg()
                try:
                    output = await anext(leg.stream)
                except EngineGone as gone:
                    output = _died(gone, self._generation)
                except StopAsyncIteration:
                    raise internal("An engine ended a request without saying why.") from None
                if output.generation != self._generation:
                    continue  # a late word of an attempt that was given up
                if (error := _error_in(output)) is not None:
                    await self._fail(leg, error)
                    continue
                output = await self._accept(leg, output)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            await self._end_leg()
            self._end_offer()

    async def _accept(self, leg: _Leg, output: EngineOutput) -> EngineOutput:
        """Keeps what another engine would need to go on from here; starts the decode leg when prefill is done."""
        if not leg.is_read:
            leg.is_read = True
            self._router.ledger.read(leg.placement)
        if self._offer is not None:
            self._offer = None  # the decode engine speaks: it has the KV, and told the prefill engine so
        if self._tokens and output.num_cached_tokens:  # what this engine found or received is no news to the client
            output = msgspec.structs.replace(output, num_cached_tokens=0)
        self._tokens += output.token_ids
        if output.prompt_logprobs is not None:  # once is enough
            sampling = msgspec.structs.replace(self._request.sampling, prompt_logprobs=None)
            self._request = msgspec.structs.replace(self._request, sampling=sampling)
        if output.finish_reason is not FinishReason.HANDOFF:
            return output
        if output.kv_source is None:
            raise internal("A prefill engine handed over without saying where its KV is.")
        self._offer = _Offer(leg.placement.engine, output.kv_source)
        await self._end_leg()
        self._leg = self._start_leg()  # before the client sees the token: the transfer runs meanwhile
        return msgspec.structs.replace(output, finish_reason=None, kv_source=None)

    async def _fail(self, leg: _Leg, error: EngineError) -> None:
        """Clears away a failed attempt. Raises `ApiError` where another one is of no use."""
        self._failures.append(error)
        engine = engine_key(leg.placement.engine)
        if error.kind is ErrorKind.OVERLOADED:
            self._full.add(engine)
        elif error.kind is ErrorKind.KV_LOST and self._offer is not None:
            self._lost.add(engine_key(self._offer.engine))
        else:
            self._lost.add(engine)
        await self._end_leg()
        self._end_offer()
        # A request that kills engines must not kill all of them.
        bugs = sum(failure.kind is ErrorKind.INTERNAL for failure in self._failures)
        if error.kind not in RETRIED or len(self._failures) >= self._settings.max_attempts or bugs > 1:
            raise from_engine(error, self._settings.capacity_timeout_s)
        self._generation += 1
        self._metrics.retries.labels(RETRIED[error.kind]).inc()
        logger.warning(
            "request %s, attempt %d after %d tokens: %s at %s: %s",
            self._request.request_id,
            len(self._failures),
            len(self._tokens),
            error.kind,
            leg.placement.engine.engine_id,
            error.message,
        )

    async def _wait_for_leg(self) -> _Leg:
        """Raises `ApiError` (503) when no engine can take the sequence in time."""
        deadline = asyncio.get_running_loop().time() + self._settings.capacity_timeout_s
        while (leg := self._start_leg()) is None:
            if self._full or asyncio.get_running_loop().time() >= deadline:
                detail = f" The last attempt: {self._failures[-1].message}" if self._failures else ""
                raise no_capacity(f"No engine can take the request now.{detail}", self._settings.capacity_timeout_s)
            await asyncio.sleep(POLL_S)
        self._leg = leg
        return leg

    def _start_leg(self) -> _Leg | None:
        """Submits to the best engine there is now, if any: for decoding where KV is on offer, else for all tokens."""
        engines = self._client.engines()
        if self._pinned_rank is not None:
            engines = only_with(engines, self._pinned_rank)
        request = msgspec.structs.replace(
            self._request, output_token_ids=list(self._tokens), generation=self._generation
        )
        wanted = self._wanted.with_tokens(num_tokens(request))
        if self._offer is not None:
            mate = self._router.decode_placement(engines, wanted, self._offer.engine, self._full)
            if mate is not None:
                return self._submit(mate, msgspec.structs.replace(request, kv_source=self._offer.source))
        route = self._router.route(engines, wanted, self._lost | self._full)
        route = route or self._router.route(engines, wanted, self._full)
        if route is None or (self._offer is not None and route.hands_off):
            return None
        if self._offer is not None:
            self._end_offer()
            self._generation += 1
            request = msgspec.structs.replace(request, generation=self._generation)
        self._note_path(route)
        return self._submit(route.placement, msgspec.structs.replace(request, keep_kv=route.hands_off))

    def _note_path(self, route: Route) -> None:
        if self._failures:
            self.path, self.reason = Path.RECOMPUTED, RETRIED[self._failures[-1].kind]
        elif self._tokens:
            self.path, self.reason = Path.RECOMPUTED, "no-decode-engine"
        else:
            self.path, self.reason = route.path, route.reason
        self._metrics.paths.labels(self.path, self.reason).inc()

    def _submit(self, placement: Placement, request: EngineRequest) -> _Leg:
        self._router.ledger.sent(placement)
        return _Leg(placement, self._client.submit(placement.engine, request))

    async def _end_leg(self) -> None:
        if (leg := self._leg) is not None:
            self._leg = None
            ledger = self._router.ledger
            (ledger.ended if leg.is_read else ledger.given_up)(leg.placement)
            await leg.stream.aclose()

    def _end_offer(self) -> None:
        if (offer := self._offer) is not None:
            self._offer = None
            self._client.abort(offer.engine, self._request.request_id, self._generation)


def _error_in(output: EngineOutput) -> EngineError | None:
    if output.finish_reason is FinishReason.ABORT:  # not by us, or nobody would be here to read it
        return EngineError(ErrorKind.ENGINE_DEAD, "The engine gave the request up.")
    return output.error


def _died(gone: EngineGone, generation: int) -> EngineOutput:
    error = EngineError(ErrorKind.ENGINE_DEAD, str(gone) or "An engine's process is gone.")
    return EngineOutput(request_id="", generation=generation, finish_reason=FinishReason.ERROR, error=error)
