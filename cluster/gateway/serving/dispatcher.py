"""What all sequences of a gateway share on their way through the engines."""

from __future__ import annotations

import time
from collections.abc import Sequence

from baton.cluster.cached_blocks import BlockName
from baton.cluster.contracts import EngineClient
from baton.engine.core.messages import EngineRequest

from ..metrics import GatewayMetrics
from ..routing.breaker import Breakers
from ..routing.router import Router
from ..settings import GatewaySettings
from .admission import AdmissionControl
from .admission_wait import AdmissionWait
from .attempt import AttemptTracker, Deadline
from .engine_selector import EngineSelector
from .handoff import HandOff
from .progress import Progress
from .retry_path import RetryPath
from .retry_policy import AttemptHistory, RetryBudget
from .sequence import Pieces, ServedSequence
from .timeline import Timeline


class Dispatcher:
    """Sends sequences to engines."""

    def __init__(
        self,
        client: EngineClient,
        router: Router,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        admission: AdmissionControl,
        breakers: Breakers,
        *,
        scales_from_zero: bool = False,
    ) -> None:
        """`scales_from_zero`: an autoscaler brings engines where requests wait for them."""
        self.scales_from_zero = scales_from_zero
        self.client = client
        self.router = router
        self.settings = settings
        self.metrics = metrics
        self.admission = admission
        self.breakers = breakers
        self.retries = RetryBudget(settings.retry_budget, settings.retry_budget_min, time.monotonic)

    def dispatch(
        self,
        request: EngineRequest,
        timeline: Timeline,
        names: Sequence[BlockName] | None = None,
        *,
        rank: int | None = None,
        session_id: str | None = None,
        deadline: Deadline = Deadline(),
    ) -> ServedSequence:
        """Return the stream of one sequence's outputs.

        `timeline` grows from here on; `names` are those of the prompt's blocks, where they are known; `rank` is that of
        an engine that must take part, whatever happens; requests with one `session_id` had best meet.
        """
        self.metrics.requests.inc()
        wanted = self.router.read(request, names, session_id=session_id, pinned_rank=rank)
        progress, history = Progress(request, wanted), AttemptHistory(self.settings.max_attempts)
        tracker = AttemptTracker(self.client, self.router.loads, self.breakers, deadline)
        selector = EngineSelector(self.client, self.router, self.breakers, self.admission, history, rank)
        handoff = HandOff(self.client, progress, selector, tracker)
        path = RetryPath(progress, selector, tracker, handoff, self.metrics)
        timeout_s = self.settings.capacity_timeout_s
        wait = AdmissionWait(path, selector, history, self.retries, self.metrics, timeout_s, self.retry_after_s)
        pieces = Pieces(progress, history, tracker, handoff, path, wait)
        return ServedSequence(pieces, self.client, self.retries, self.metrics, timeline)

    def retry_after_s(self) -> float:
        """When it may be worth to come again: where somebody serves, behind its queue."""
        return self.admission.retry_after_s(self.client.engines())

    def is_ready(self) -> bool:
        """Whether some path through the engines exists now, or comes with the first request."""
        return self.scales_from_zero or any(view.record.role.writes_answers for view in self.client.engines())
