"""What this gateway has sent to engines and they have not told of yet, and what they told of others' requests."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.cluster.cached_blocks import BlockName, CachedBlocks, FoundPrefix
from baton.cluster.contracts import EngineRecord, EngineView
from baton.engine.core.messages import EngineStats

from .cost import Load

EngineKey = tuple[str, int]  # engine id, epoch
REPORT_DELAY_S = 1.0  # after which an engine has told what a request left in its prefix cache


def engine_key(record: EngineRecord) -> EngineKey:
    return record.engine_id, record.epoch


@dataclass(frozen=True)
class Placement:
    """A request on an engine."""

    engine: EngineRecord
    uncached: int  # tokens to prefill there
    names: Sequence[BlockName] = ()  # of the prompt's blocks, where the engine computes them: it will have them cached


@dataclass(frozen=True)
class _Report:
    """An engine's newest word."""

    stats: EngineStats
    others: Load  # what of it is not this gateway's


class LoadTracker:
    """Requests in engines, prompt tokens in their queues, and prefixes that are about to be cached there.

    SENT --first token--> READ --end--> FORGOTTEN, prefixes `REPORT_DELAY_S` later
    SENT --given up-----> FORGOTTEN
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests: Counter[EngineKey] = Counter()
        self._tokens: Counter[EngineKey] = Counter()
        self._expected: defaultdict[EngineKey, Counter[BlockName]] = defaultdict(Counter)
        self._ended: deque[tuple[float, Placement]] = deque()
        self._reports: dict[int, _Report] = {}  # by rank: an engine that takes another's takes this place, too

    def sent(self, placement: Placement) -> None:
        """Call `read` and `ended`, or `given_up`, once for each call of this."""
        self._forget_old()
        key = engine_key(placement.engine)
        self._requests[key] += 1
        self._tokens[key] += placement.uncached
        if placement.names:
            self._expected[key].update(placement.names)

    def read(self, placement: Placement) -> None:
        """Its first token is out."""
        _subtract(self._tokens, engine_key(placement.engine), placement.uncached)

    def ended(self, placement: Placement) -> None:
        _subtract(self._requests, engine_key(placement.engine), 1)
        if placement.names:
            self._ended.append((self._clock() + REPORT_DELAY_S, placement))

    def given_up(self, placement: Placement) -> None:
        """It ended before its first token: nobody knows what of it is cached."""
        self.read(placement)
        _subtract(self._requests, engine_key(placement.engine), 1)
        self._forget_names(placement)

    def of(self, view: EngineView) -> Load:
        """What is in an engine: this gateway's part as of now, that of others as of the engine's newest word."""
        key, stats = engine_key(view.record), view.stats
        own = Load(self._requests[key], self._tokens[key])
        if stats is None:
            return own
        news = self._reports.get(view.record.rank)
        if news is None or news.stats is not stats:
            news = self._reports[view.record.rank] = _Report(stats, _others(stats, view.outstanding, own.queued_tokens))
        others = news.others
        return Load(own.num_requests + others.num_requests, own.queued_tokens + others.queued_tokens)

    def find_prefix(self, cached: CachedBlocks, key: EngineKey, names: Sequence[BlockName]) -> FoundPrefix:
        """Blocks at the start of a prompt that are in the pool by the time it runs, and those that can be restored."""
        count, coming = cached.count_prefix(names), self._expected.get(key)
        if coming:
            while count < len(names) and (names[count] in coming or names[count] in cached):
                count += 1
        return cached.find_behind(names, count)

    def _forget_old(self) -> None:
        now = self._clock()
        while self._ended and self._ended[0][0] <= now:
            _, placement = self._ended.popleft()
            self._forget_names(placement)

    def _forget_names(self, placement: Placement) -> None:
        key = engine_key(placement.engine)
        coming = self._expected[key]
        for name in placement.names:
            _subtract(coming, name, 1)
        if not coming:
            del self._expected[key]  # engines come and go


def _others(stats: EngineStats, own_requests: int, own_tokens: int) -> Load:
    """Of news that have just come: this gateway's part of them is what it has there now."""
    in_engine = stats.num_requests_running + stats.num_requests_waiting + stats.num_requests_waiting_for_kv
    return Load(max(0, in_engine - own_requests), max(0, stats.num_waiting_tokens - own_tokens))


def _subtract(counter: Counter, key: object, amount: int) -> None:
    counter[key] -= amount
    if not counter[key]:
        del counter[key]
