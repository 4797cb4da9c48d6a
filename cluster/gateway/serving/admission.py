"""Who may come in: the queues of this gateway and of each engine have an end, and who stands outside is told for how
long.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baton.cluster.contracts import EngineView, Role
from baton.engine.core.messages import EngineStats

from ..errors import engines_full, key_limit, queue_full
from ..routing.load import EngineKey, engine_key
from ..routing.sliding_window import SlidingWindow
from ..settings import GatewaySettings

WINDOW_S = 10.0
ENDED, REFUSED = 0, 1
MOST_RETRY_S = 60.0
SAMPLE_S = 0.5  # between looks at an engine's counters


class AdmissionControl:
    """Of one gateway."""

    def __init__(self, settings: GatewaySettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._window = SlidingWindow(WINDOW_S, clock)
        self._speeds = PromptSpeeds(settings.cost.prefill_tokens_per_s, clock)
        self._of_key: Counter[bytes] = Counter()
        self.num_inflight = 0

    @contextmanager
    def place(self, key: bytes | None) -> Iterator[None]:
        """One request of this gateway, by the client with this API key. Raises `ApiError` (429)."""
        settings = self._settings
        if self.num_inflight >= settings.max_inflight_requests:
            raise queue_full(settings.max_inflight_requests, self._until_place_s())
        most = settings.max_inflight_per_key
        if most is not None and key is not None and self._of_key[key] >= most:
            raise key_limit(most, self._until_place_s())
        self.num_inflight += 1
        if key is not None:
            self._of_key[key] += 1
        try:
            yield
        finally:
            self.num_inflight -= 1
            self._window.add(ENDED)
            if key is not None:
                self._of_key[key] -= 1
                if not self._of_key[key]:
                    del self._of_key[key]

    def check_engines(self, engines: Sequence[EngineView]) -> None:
        """Raises `ApiError` (503) where every engine that could read a prompt has a full queue."""
        self._speeds.look_at(_readers(engines))
        if engines and self.are_full(engines):
            raise engines_full(self.retry_after_s(engines))

    def are_full(self, engines: Sequence[EngineView], refused_by: Collection[EngineKey] = ()) -> bool:
        """Whether no engine that could read a prompt has room in its queue, as it told or by having refused."""
        limits = self._settings.queue_limits
        return all(
            engine_key(view.record) in refused_by or (view.stats is not None and limits.reached(view.stats))
            for view in _readers(engines)
        )

    def retry_after_s(self, engines: Sequence[EngineView]) -> float:
        """Until the shortest queue of those that read prompts is worked off; until one may be there, where none is."""
        queues_s = [self._speeds.until_read_s(view) for view in _readers(engines)]
        return clip_s(min(queues_s, default=self._settings.capacity_timeout_s))

    def _until_place_s(self) -> float:
        """As many as were refused lately come back before this one: places are given up at the speed of late."""
        self._window.add(REFUSED)
        per_s = max(1, self._window.count(ENDED)) / WINDOW_S
        return clip_s(self._window.count(REFUSED) / per_s)


def _readers(engines: Sequence[EngineView]) -> Sequence[EngineView]:
    """Those whose queues a prompt waits in."""
    return [view for view in engines if view.record.role is not Role.DECODE] or engines


class PromptSpeeds:
    """How fast engines compute prompts, as their counters told while somebody waited there."""

    def __init__(self, assumed: float, clock: Callable[[], float]) -> None:
        """`assumed`: tokens a second, of engines that have not shown theirs."""
        self._assumed, self._clock = assumed, clock
        self._seen: dict[EngineKey, _Sample] = {}

    def look_at(self, engines: Sequence[EngineView]) -> None:
        now_s = self._clock()
        if len(self._seen) > 2 * len(engines):
            alive = {engine_key(view.record) for view in engines}
            self._seen = {key: sample for key, sample in self._seen.items() if key in alive}
        for view in engines:
            stats = view.stats
            if stats is None:
                continue
            key = engine_key(view.record)
            old = self._seen.get(key)
            if old is None:
                self._seen[key] = _Sample(now_s, _num_read(stats), stats.num_requests_waiting > 0)
            elif now_s - old.at_s >= SAMPLE_S:
                self._seen[key] = old.followed_by(now_s, stats)

    def until_read_s(self, view: EngineView) -> float:
        if view.stats is None:
            return 0.0
        sample = self._seen.get(engine_key(view.record))
        return view.stats.num_waiting_tokens / ((sample and sample.per_s) or self._assumed)


@dataclass(frozen=True)
class _Sample:
    at_s: float
    num_read: int
    had_queue: bool
    per_s: float = 0.0  # 0: not seen yet

    def followed_by(self, now_s: float, stats: EngineStats) -> _Sample:
        has_queue = stats.num_requests_waiting > 0
        newest = (_num_read(stats) - self.num_read) / (now_s - self.at_s)
        tells = self.had_queue and has_queue and newest > 0
        per_s = (newest if not self.per_s else (self.per_s + newest) / 2) if tells else self.per_s
        return _Sample(now_s, _num_read(stats), has_queue, per_s)


def _num_read(stats: EngineStats) -> int:
    """Tokens of prompts that were computed, as those are that wait."""
    return stats.prompt_tokens - stats.prefix_cache_hits


def clip_s(seconds: float) -> float:
    """What a client can be told: whole seconds, and not to come back tomorrow."""
    return min(MOST_RETRY_S, max(1.0, float(math.ceil(seconds))))
