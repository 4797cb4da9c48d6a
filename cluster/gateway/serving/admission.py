"""Admission of requests to a gateway: limits on its running requests and on the engines' queues, and `Retry-After`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from baton.cluster.contracts import EngineView, Role
from baton.kv_transfer.protocol.messages import EngineKey

from ..errors import engines_full, key_limit, queue_full
from ..routing.rates import LearntRates
from ..routing.sliding_window import SlidingWindow
from ..settings import GatewaySettings

WINDOW_S = 10.0
ENDED, REFUSED = 0, 1
MAX_RETRY_S = 60.0


class AdmissionControl:
    """Admits requests to one gateway."""

    def __init__(self, settings: GatewaySettings, rates: LearntRates, clock: Callable[[], float]) -> None:
        self._settings, self._rates = settings, rates
        self._window = SlidingWindow(WINDOW_S, clock)
        self._num_by_key: Counter[bytes] = Counter()
        self.num_inflight = 0

    @property
    def num_keys(self) -> int:
        """The number of API keys with running requests."""
        return len(self._num_by_key)

    def reconfigure(self, settings: GatewaySettings) -> None:
        """Apply other limits from the next request on; running requests continue even if they exceed them."""
        self._settings = settings

    @contextmanager
    def admit(self, key: bytes | None) -> Iterator[None]:
        """Count a request with this API key until it ends. Raises `ApiError` (429) if there are too many."""
        settings = self._settings
        if self.num_inflight >= settings.max_inflight_requests:
            raise queue_full(settings.max_inflight_requests, self._wait_s())
        most = settings.max_inflight_per_key
        if most is not None and key is not None and self._num_by_key[key] >= most:
            raise key_limit(most, self._wait_s())
        self.num_inflight += 1
        if key is not None:
            self._num_by_key[key] += 1
        try:
            yield
        finally:
            self.num_inflight -= 1
            self._window.add(ENDED)
            if key is not None:
                self._num_by_key[key] -= 1
                if not self._num_by_key[key]:
                    del self._num_by_key[key]

    def check_engines(self, engines: Sequence[EngineView]) -> None:
        """Raise `ApiError` (503) if every engine that could compute a prompt has a full queue."""
        if engines and self.are_full(engines):
            raise engines_full(self.retry_after_s(engines))

    def are_full(self, engines: Sequence[EngineView], refused_by: Collection[EngineKey] = ()) -> bool:
        """Return True if every engine that could compute a prompt has reported a full queue, or is in `refused_by`."""
        bound = self._settings.queue_limits.bound
        return all(
            view.record.key in refused_by or (view.stats is not None and bound.is_reached(view.stats))
            for view in _prompt_engines(engines)
        )

    def retry_after_s(self, engines: Sequence[EngineView]) -> float:
        """Return the time in which the shortest queue is worked off, or `capacity_timeout_s` if there is no engine."""
        self._rates.renew(engines)
        queues_s = [
            0.0 if view.stats is None else self._rates.prefill_s(view, view.stats.num_waiting_tokens)
            for view in _prompt_engines(engines)
        ]
        return clip_s(min(queues_s, default=self._settings.capacity_timeout_s))

    def _wait_s(self) -> float:
        """Return the time until a refused request may be admitted, at the rate at which requests have ended lately.

        Requests that were refused lately will return before it, so they count, too.
        """
        self._window.add(REFUSED)
        per_s = max(1, self._window.count(ENDED)) / WINDOW_S
        return clip_s(self._window.count(REFUSED) / per_s)


def _prompt_engines(engines: Sequence[EngineView]) -> Sequence[EngineView]:
    """Return the engines that compute prompts."""
    return [view for view in engines if view.record.role is not Role.DECODE] or engines


def clip_s(seconds: float) -> float:
    """Round to whole seconds, within the limits of `Retry-After`."""
    return min(MAX_RETRY_S, max(1.0, float(math.ceil(seconds))))
