"""The load of engines: this gateway's requests as of now, and those of other gateways as engines reported them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.cluster.cached_blocks import BlockName
from baton.cluster.contracts import EngineRecord, EngineView
from baton.engine.core.messages import EngineStats

from .cost import Load
from .prefix_index import EngineKey, PrefixIndex, engine_key


@dataclass(frozen=True)
class Placement:
    """A request in an engine."""

    engine: EngineRecord
    uncached: int  # tokens to prefill there
    names: Sequence[BlockName] = ()  # of the prompt's blocks, if the engine computes them: they will be cached there


@dataclass(frozen=True)
class _Report:
    """An engine's newest statistics."""

    stats: EngineStats
    others: Load  # the part of other gateways


class LoadTracker:
    """Counts this gateway's requests in engines, and the tokens of their prompts that are still to be computed.

    SENT ──first token──> READ ──end──> forgotten; its prefix is expected for a while
    SENT ──given up─────> forgotten, with its prefix
    """

    def __init__(self, prefixes: PrefixIndex) -> None:
        """`prefixes` learns which blocks the requests will leave in engines."""
        self._prefixes = prefixes
        self._requests: Counter[EngineKey] = Counter()
        self._tokens: Counter[EngineKey] = Counter()
        self._reports: dict[int, _Report] = {}  # by rank: the successor of an engine takes its entry

    @property
    def num_reports(self) -> int:
        """The number of ranks whose last report is kept."""
        return len(self._reports)

    @property
    def own(self) -> Load:
        """All of this gateway's own requests and tokens, in any engine."""
        return Load(self._requests.total(), self._tokens.total())

    def sent(self, placement: Placement) -> None:
        """Count a request. Call `read` and `ended`, or `given_up`, once for each call of this."""
        key = engine_key(placement.engine)
        self._requests[key] += 1
        self._tokens[key] += placement.uncached
        self._prefixes.expect(key, placement.names)

    def read(self, placement: Placement) -> None:
        """Note that its first token is there."""
        _subtract(self._tokens, engine_key(placement.engine), placement.uncached)

    def ended(self, placement: Placement) -> None:
        """Note that it has ended after its first token."""
        key = engine_key(placement.engine)
        _subtract(self._requests, key, 1)
        self._prefixes.ended(key, placement.names)

    def given_up(self, placement: Placement) -> None:
        """Note that it has ended before its first token: it is not known which of its blocks are cached."""
        self.read(placement)
        key = engine_key(placement.engine)
        _subtract(self._requests, key, 1)
        self._prefixes.forget(key, placement.names)

    def of(self, view: EngineView) -> Load:
        """Return the load of an engine."""
        key, stats = engine_key(view.record), view.stats
        own = Load(self._requests[key], self._tokens[key])
        if stats is None:
            return own
        report = self._reports.get(view.record.rank)
        if report is None or report.stats is not stats:
            others = _others(stats, view.outstanding, own.queued_tokens)
            report = self._reports[view.record.rank] = _Report(stats, others)
        others = report.others
        return Load(own.num_requests + others.num_requests, own.queued_tokens + others.queued_tokens)


def _others(stats: EngineStats, own_requests: int, own_tokens: int) -> Load:
    """Return the part of other gateways in statistics that have just come: all but what this gateway has there now."""
    return Load(max(0, stats.num_requests - own_requests), max(0, stats.num_waiting_tokens - own_tokens))


def _subtract(counter: Counter[EngineKey], key: EngineKey, amount: int) -> None:
    counter[key] -= amount
    if not counter[key]:
        del counter[key]
