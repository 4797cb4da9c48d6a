"""The prefixes that engines have cached: as they reported, and as this gateway's own requests will leave them there."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

from baton.cluster.cached_blocks import BlockName, CachedBlocks, FoundPrefix
from baton.engine.core.block_log import pack_names
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.prefix import block_hashes
from baton.engine.core.sampling import SamplingParams
from baton.kv_transfer.protocol.messages import EngineKey

REPORT_DELAY_S = 1.0  # after a request's end; by then its engine has reported which of its blocks are cached


def prefix_names(prompt: Sequence[int], sampling: SamplingParams, salt: str) -> bytes:
    """Return the packed names of the prompt's full blocks that an engine may find in its cache.

    There are none if every position has to be computed, as with `prompt_logprobs`. Hashing takes about a microsecond
    for each block, so call this once for each prompt, however many choices it has.
    """
    if sampling.prompt_logprobs is not None:
        return b""
    findable = prompt[: (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE]
    return pack_names(block_hashes(findable, BLOCK_SIZE, salt))


class PrefixIndex:
    """Finds the beginnings of prompts in the caches of engines.

    A request's blocks are expected in its engine's cache from submission until `REPORT_DELAY_S` after its end.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._expected: defaultdict[EngineKey, Counter[BlockName]] = defaultdict(Counter)
        self._ended: deque[tuple[float, EngineKey, Sequence[BlockName]]] = deque()  # with the end of expectation

    @property
    def num_expected(self) -> int:
        """The number of blocks that are expected in any engine's cache."""
        return sum(map(len, self._expected.values()))

    def find(self, cached: CachedBlocks, key: EngineKey, names: Sequence[BlockName]) -> FoundPrefix:
        """Count the leading blocks that the pool will have when the prompt runs, and those that tiers can restore."""
        return cached.find(names, self._expected.get(key, ()))

    def count_present(self, cached: CachedBlocks, key: EngineKey, names: Sequence[BlockName]) -> int:
        """Count the leading blocks that a hand-off of the prompt to this engine need not bring."""
        return cached.count_present(names, self._expected.get(key, ()))

    def expect(self, key: EngineKey, names: Sequence[BlockName]) -> None:
        """Expect a request's blocks in its engine's cache. After each call, call either `ended` or `forget`."""
        while self._ended and self._ended[0][0] <= self._clock():
            _, ended_key, ended_names = self._ended.popleft()
            self.forget(ended_key, ended_names)
        if names:
            self._expected[key].update(names)

    def ended(self, key: EngineKey, names: Sequence[BlockName]) -> None:
        """Expect a request's blocks for a while longer, until the engine has reported them."""
        if names:
            self._ended.append((self._clock() + REPORT_DELAY_S, key, names))

    def forget(self, key: EngineKey, names: Sequence[BlockName]) -> None:
        """Stop expecting a request's blocks."""
        expected = self._expected[key]
        expected.subtract(names)
        for name in names:
            if not expected[name]:
                del expected[name]
        if not expected:
            del self._expected[key]  # engines come and go
