"""The load of engines: this gateway's own requests as of now, and those of other gateways as engines reported them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.cluster.cached_blocks import BlockName
from baton.cluster.contracts import EngineRecord, EngineView
from baton.engine.core.messages import EngineStats
from baton.kv_transfer.protocol.messages import EngineKey

from .cost import Load
from .prefix_index import PrefixIndex


@dataclass(frozen=True)
class Placement:
    """A request's place in an engine."""

    engine: EngineRecord
    uncached: int  # tokens that the engine must prefill
    names: Sequence[BlockName] = ()  # of the prompt's blocks, if the engine computes them and so will have them cached


@dataclass(frozen=True)
class _Report:
    """An engine's newest statistics."""

    stats: EngineStats
    others: Load  # the share of other gateways' requests


class LoadTracker:
    """Counts this gateway's requests in engines, and their prompt tokens that are still to be computed.

    SENT ──first token──> ANSWERING ──end──> forgotten; its prefix is expected in the cache for a while
    SENT ──given up─────> forgotten, with its prefix
    """

    def __init__(self, prefixes: PrefixIndex) -> None:
        """`prefixes` is told which blocks the requests will leave in the engines' caches."""
        self._prefixes = prefixes
        self._requests: Counter[EngineKey] = Counter()
        self._tokens: Counter[EngineKey] = Counter()
        self._reports: dict[int, _Report] = {}  # by rank, so that an engine's successor replaces its entry

    @property
    def num_reports(self) -> int:
        """The number of ranks whose last report is kept."""
        return len(self._reports)

    @property
    def own(self) -> Load:
        """All of this gateway's own requests and tokens, in any engine."""
        return Load(self._requests.total(), self._tokens.total())

    def sent(self, placement: Placement) -> None:
        """Count a request. After each call, call either `first_token` and `ended`, or `given_up`."""
        key = placement.engine.key
        self._requests[key] += 1
        self._tokens[key] += placement.uncached
        self._prefixes.expect(key, placement.names)

    def first_token(self, placement: Placement) -> None:
        """Note that the request's first token has arrived."""
        _subtract(self._tokens, placement.engine.key, placement.uncached)

    def ended(self, placement: Placement) -> None:
        """Note that the request has ended after its first token."""
        key = placement.engine.key
        _subtract(self._requests, key, 1)
        self._prefixes.ended(key, placement.names)

    def given_up(self, placement: Placement) -> None:
        """Note that the request has ended before its first token: which of its blocks are cached is unknown."""
        self.first_token(placement)
        key = placement.engine.key
        _subtract(self._requests, key, 1)
        self._prefixes.forget(key, placement.names)

    def of(self, view: EngineView) -> Load:
        """Return the load of an engine."""
        key, stats = view.record.key, view.stats
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
    """Return other gateways' share of newly reported statistics: all but what this gateway has in the engine now."""
    return Load(max(0, stats.num_requests - own_requests), max(0, stats.num_waiting_tokens - own_tokens))


def _subtract(counter: Counter[EngineKey], key: EngineKey, amount: int) -> None:
    counter[key] -= amount
    if not counter[key]:
        del counter[key]
