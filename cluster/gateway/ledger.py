"""What this gateway has sent to engines and they have not told of yet."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.cluster.cached_blocks import BlockName, CachedBlocks
from baton.cluster.contracts import EngineRecord

EngineKey = tuple[str, int]  # engine id, epoch
NEWS_DELAY_S = 1.0  # after which an engine has told what a request left in its prefix cache


def engine_key(record: EngineRecord) -> EngineKey:
    return record.engine_id, record.epoch


@dataclass(frozen=True)
class Placement:
    """A request on an engine."""

    engine: EngineRecord
    uncached: int  # tokens to prefill there
    names: Sequence[BlockName] = ()  # of the prompt's blocks, where the engine computes them: it will have them cached


class Ledger:
    """Requests in engines, prompt tokens in their queues, and prefixes that are about to be cached there.

    SENT --first token--> READ --end--> FORGOTTEN, prefixes `NEWS_DELAY_S` later
    SENT --given up-----> FORGOTTEN
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests: Counter[EngineKey] = Counter()
        self._tokens: Counter[EngineKey] = Counter()
        self._coming: defaultdict[EngineKey, Counter[BlockName]] = defaultdict(Counter)
        self._ended: deque[tuple[float, Placement]] = deque()

    def sent(self, placement: Placement) -> None:
        """Call `read` and `ended`, or `given_up`, once for each call of this."""
        self._forget_old()
        key = engine_key(placement.engine)
        self._requests[key] += 1
        self._tokens[key] += placement.uncached
        if placement.names:
            self._coming[key].update(placement.names)

    def read(self, placement: Placement) -> None:
        """Its first token is out."""
        _subtract(self._tokens, engine_key(placement.engine), placement.uncached)

    def ended(self, placement: Placement) -> None:
        _subtract(self._requests, engine_key(placement.engine), 1)
        if placement.names:
            self._ended.append((self._clock() + NEWS_DELAY_S, placement))

    def given_up(self, placement: Placement) -> None:
        """It ended before its first token: nobody knows what of it is cached."""
        self.read(placement)
        _subtract(self._requests, engine_key(placement.engine), 1)
        self._forget_names(placement)

    def num_requests(self, key: EngineKey) -> int:
        return self._requests[key]

    def num_tokens(self, key: EngineKey) -> int:
        return self._tokens[key]

    def count_prefix(self, cached: CachedBlocks, key: EngineKey, names: Sequence[BlockName]) -> int:
        """Blocks at the start of a prompt that are cached by the time it runs."""
        count, coming = cached.count_prefix(names), self._coming.get(key)
        if coming:
            while count < len(names) and (names[count] in coming or names[count] in cached):
                count += 1
        return count

    def _forget_old(self) -> None:
        now = self._clock()
        while self._ended and self._ended[0][0] <= now:
            _, placement = self._ended.popleft()
            self._forget_names(placement)

    def _forget_names(self, placement: Placement) -> None:
        key = engine_key(placement.engine)
        coming = self._coming[key]
        for name in placement.names:
            _subtract(coming, name, 1)
        if not coming:
            del self._coming[key]  # engines come and go


def _subtract(counter: Counter, key: object, amount: int) -> None:
    counter[key] -= amount
    if not counter[key]:
        del counter[key]
