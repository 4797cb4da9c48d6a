"""Requests whose output must fit a grammar.

    add ──> WAITING_FOR_GRAMMAR ──the first mask──> WAITING ... RUNNING
                                                                 │ ^
                      a step that draws takes the mask, its token makes the next one

Where a request gets drafts, its grammar looks ahead: with the mask of the next token it makes one behind each guess
that may follow.

Compiling a grammar takes up to seconds, and a mask from microseconds to seconds: both happen in threads. A request
without a mask sits steps out (`Request.horizon`), or stands aside in the queue where it was preempted, and nobody else
waits for it longer than `PATIENCE_S`. So a token is drawn only when the one before it is known or guessed; other
requests go on two steps at a time.
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

PATIENCE_S = 0.001  # what a step waits for masks of tokens that came since the step before
OPENING_LIMIT_S = 90.0  # from a request's arrival to its first mask; compilations wait for each other
MASK_LIMIT_S = 10.0  # from a token to the next mask
MOST_THREADS = 4
MOST_OPENERS = 64  # they wait for a compiler; requests beyond these wait for one of them


@dataclass(slots=True)
class _Task:
    work: Future[tuple[Grammar, bytes, LookAhead]]
    deadline_s: float
    is_fresh: bool = True  # no step has waited for it yet


class Constraints:
    """The grammars of all requests that have one. Without a source, none has.

    `openers` compile grammars, `maskers` compute masks.
    """

    def __init__(self, source: GrammarSource | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.can_open = source is not None
        self.num_live = 0  # requests with a grammar that are not over
        self._source = source
        self._clock = clock
        self._tasks: dict[Request, _Task] = {}  # for each request that has no mask
        threads = min(MOST_THREADS, os.cpu_count() or 1)
        # Two, so that nothing but new grammars waits for a compiler. Their threads start when they are first needed.
        self.openers: Executor = ThreadPoolExecutor(MOST_OPENERS, "baton-grammars")
        self.maskers: Executor = ThreadPoolExecutor(threads, "baton-masks")

    @property
    def is_busy(self) -> bool:
        """True while a request has no mask yet."""
        return bool(self._tasks)

    def awaits_mask(self, request: Request) -> bool:
        return request in self._tasks

    @property
    def num_opening(self) -> int:
        return sum(request.status is RequestStatus.WAITING_FOR_GRAMMAR for request in self._tasks)

    def stats(self) -> GrammarStats:
        return GrammarStats() if self._source is None else self._source.stats()

    def open(self, request: Request) -> None:
        """Start to compile a new request's grammar. Tokens that another engine drew are accepted first."""
        request.move_to(RequestStatus.WAITING_FOR_GRAMMAR)
        self.num_live += 1
        assert self._source is not None
        threads = self.maskers if self._source.knows(_asked_by(request)) else self.openers
        work = threads.submit(_open, self._source, request)
        self._tasks[request] = _Task(work, self._clock() + OPENING_LIMIT_S, is_fresh=False)

    def advance(self, request: Request, token_ids: Sequence[int], guesses: Sequence[int] = (), most: int = 0) -> None:
        """Start to compute the mask behind the next tokens of the output, and to look ahead of them.

        Up to `most` tokens may follow as drafts: `guesses`, as far as the grammar lets them.
        """
        assert request.grammar is not None
        work = self.maskers.submit(_advance, request.grammar, token_ids, guesses, most)
        self._tasks[request] = _Task(work, self._clock() + MASK_LIMIT_S)

    def collect(self) -> list[tuple[Request, EngineError | None]]:
        """Return the requests that have their mask now, and those that never will, with the error."""
        if not self._tasks:
            return []
        fresh = [task for task in self._tasks.values() if task.is_fresh]
        if fresh:
            wait([task.work for task in fresh], PATIENCE_S)
            for task in fresh:
                task.is_fresh = False
        now = self._clock()
        over = [each for each in self._tasks.items() if each[1].work.done() or now >= each[1].deadline_s]
        return [(request, self._finish(request, task)) for request, task in over]

    def pause(self) -> None:
        """Wait shortly for a mask, when no request can run without one."""
        wait([task.work for task in self._tasks.values()], PATIENCE_S, return_when="FIRST_COMPLETED")

    def drop(self, request: Request) -> None:
        """Forget a request that is over, and cancel its compilation. A mask that is being computed is dropped."""
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
        reason = "too many requests wait for their grammars to be compiled, or for what these let follow"
        return EngineError(ErrorKind.OVERLOADED, reason)
    reason = f"does not say within {MASK_LIMIT_S:g} s which tokens may follow: simplify nested repetitions"
    return EngineError(ErrorKind.INVALID, reason, f"{ASKED_BY}.{_asked_by(request).kind}")
