"""Requests whose output must match a grammar.

    add ──> WAITING_FOR_GRAMMAR ──the first mask──> WAITING ... RUNNING
                                                                 │ ^
                    a step draws a token with the mask; the token leads to the next mask

For a request with drafts, the grammar looks ahead: besides the mask for the next token, it computes one after each
guess that it allows.

Compiling a grammar takes up to seconds, and a mask from microseconds to seconds: both happen in threads. A request
without a mask skips steps (`Request.horizon`), or, if it was preempted, is passed over in the queue; no step waits for
it longer than `MASK_WAIT_S`. So such a request draws a token only when the one before it is known or guessed, while
other requests have two steps in flight.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from ..grammar import ASKED_BY, NOT_AHEAD, Grammar, GrammarRefused, GrammarSource, GrammarStats, LookAhead
from ..messages import EngineError, ErrorKind
from ..sampling import StructuredOutputsParams
from .request import Request, RequestStatus

logger = logging.getLogger(__name__)

MASK_WAIT_S = 0.001  # the longest that a step waits for masks after tokens that came since the step before
OPENING_LIMIT_S = 90.0  # from a request's arrival to its first mask; compilations wait for each other
MASK_LIMIT_S = 10.0  # from a token to the next mask
MOST_THREADS = 4
MOST_OPENERS = 64  # threads, each of which waits for the compiler; further requests wait for a thread


@dataclass(slots=True)
class _Task:
    work: Future[tuple[Grammar, bytes, LookAhead]]
    deadline_s: float
    is_fresh: bool = True  # no step has waited for it yet


class Constraints:
    """The grammars of all requests that have one. Without a `source`, no request has.

    The threads of `openers` compile grammars, those of `maskers` compute masks.
    """

    def __init__(self, source: GrammarSource | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.can_open = source is not None
        self.num_live = 0  # requests with a grammar that have not ended
        self._source = source
        self._clock = clock
        self._tasks: dict[Request, _Task] = {}  # of each request without a mask
        threads = min(MOST_THREADS, os.cpu_count() or 1)
        # Two pools, so that only new grammars wait for the compiler. Threads start when they are first needed.
        self.openers: Executor = ThreadPoolExecutor(MOST_OPENERS, "baton-grammars")
        self.maskers: Executor = ThreadPoolExecutor(threads, "baton-masks")

    @property
    def is_busy(self) -> bool:
        """True while some request waits for a mask."""
        return bool(self._tasks)

    def awaits_mask(self, request: Request) -> bool:
        return request in self._tasks

    @property
    def num_opening(self) -> int:
        return sum(request.status is RequestStatus.WAITING_FOR_GRAMMAR for request in self._tasks)

    def stats(self) -> GrammarStats:
        return GrammarStats() if self._source is None else self._source.stats()

    def open(self, request: Request) -> None:
        """Start to compile a new request's grammar. It first accepts tokens that another engine drew."""
        request.move_to(RequestStatus.WAITING_FOR_GRAMMAR)
        self.num_live += 1
        assert self._source is not None
        threads = self.maskers if self._source.knows(_asked_by(request)) else self.openers
        work = threads.submit(_open, self._source, request)
        self._tasks[request] = _Task(work, self._clock() + OPENING_LIMIT_S, is_fresh=False)

    def advance(self, request: Request, token_ids: Sequence[int], guesses: Sequence[int] = (), most: int = 0) -> None:
        """Start to compute the mask after the next tokens of the output, and to look ahead.

        Up to `most` tokens may follow as drafts: the `guesses` that the grammar allows.
        """
        assert request.grammar is not None
        work = self.maskers.submit(_advance, request.grammar, token_ids, guesses, most)
        self._tasks[request] = _Task(work, self._clock() + MASK_LIMIT_S)

    def collect(self) -> list[tuple[Request, EngineError | None]]:
        """Return the requests whose mask is ready, and, with the error, those that will never get one."""
        if not self._tasks:
            return []
        fresh = [task for task in self._tasks.values() if task.is_fresh]
        if fresh:
            wait([task.work for task in fresh], MASK_WAIT_S)
            for task in fresh:
                task.is_fresh = False
        now = self._clock()
        over = [each for each in self._tasks.items() if each[1].work.done() or now >= each[1].deadline_s]
        return [(request, self._finish(request, task)) for request, task in over]

    def pause(self) -> None:
        """Wait briefly for any mask. Called when no request can run without one."""
        wait([task.work for task in self._tasks.values()], MASK_WAIT_S, return_when="FIRST_COMPLETED")

    def drop(self, request: Request) -> None:
        """Forget a request that has ended, and cancel its compilation. A mask that is being computed is discarded."""
        self.num_live -= 1
        if (task := self._tasks.pop(request, None)) is not None:
            task.work.cancel()

    def _finish(self, request: Request, task: _Task) -> EngineError | None:
        del self._tasks[request]
        if not task.work.done():
            return _too_slow(request, has_begun=not task.work.cancel())
        match task.work.exception():
            case None:
                request.grammar, mask, ahead = task.work.result()
                request.allow(mask, ahead)
                return None
            case GrammarRefused() as refused:
                if refused.detail:
                    logger.error("the grammar of request %s was refused: %s", request.request_id, refused.detail)
                field = f"{ASKED_BY}.{_asked_by(request).kind}{refused.place}"
                return EngineError(ErrorKind.INVALID, str(refused), field)
            case error:
                logger.error("the grammar of request %s failed", request.request_id, exc_info=error)
                return EngineError(ErrorKind.INTERNAL, f"the grammar failed: {error!r}")


def _asked_by(request: Request) -> StructuredOutputsParams:
    asked = request.message.sampling.structured_outputs
    assert asked is not None
    return asked


def _open(source: GrammarSource, request: Request) -> tuple[Grammar, bytes, LookAhead]:
    grammar = source.open(_asked_by(request), lambda: request.status is RequestStatus.WAITING_FOR_GRAMMAR)
    return _advance(grammar, request.message.output_token_ids)


def _advance(
    grammar: Grammar, token_ids: Sequence[int], guesses: Sequence[int] = (), most: int = 0
) -> tuple[Grammar, bytes, LookAhead]:
    mask = grammar.advance(token_ids)
    return grammar, mask, grammar.look_ahead(guesses, most) if most else NOT_AHEAD


def _too_slow(request: Request, *, has_begun: bool) -> EngineError:
    if request.status is RequestStatus.WAITING_FOR_GRAMMAR or not has_begun:
        reason = "too many requests wait for their grammars to be compiled, or for the masks of their next tokens"
        return EngineError(ErrorKind.OVERLOADED, reason)
    reason = f"does not say within {MASK_LIMIT_S:g} s which tokens may follow: simplify nested repetitions"
    return EngineError(ErrorKind.INVALID, reason, f"{ASKED_BY}.{_asked_by(request).kind}")
