"""What the router remembers of who has seen which prefix. A guess: engines evict without telling."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

CHUNK_TOKENS = 64  # coarser than a KV block: a quarter of the work, and shorter hits are not worth a detour

EngineKey = tuple[str, int]  # engine id, epoch


def prefix_chain(token_ids: Sequence[int], salt: Iterable[str]) -> list[int]:
    """One hash for each prefix of whole chunks. Equal only for equal tokens and equal salt (cache salt, adapter).

    Python's hash is enough: it stays in this process, and a collision only sends a request to a colder engine.
    """
    chain, parent = [], hash(tuple(salt))
    for start in range(0, len(token_ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        parent = hash((parent, *token_ids[start : start + CHUNK_TOKENS]))
        chain.append(parent)
    return chain


class PrefixMemory:
    """Least recently used prefixes go first, one chunk at a time; `capacity` counts chunks over all engines."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[tuple[int, EngineKey], None] = OrderedDict()

    def remember(self, chain: Sequence[int], engine: EngineKey) -> None:
        for prefix in reversed(chain):  # so that a chain is forgotten from its end
            self._seen[prefix, engine] = None
            self._seen.move_to_end((prefix, engine))
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def cached_tokens(self, chain: Sequence[int], engine: EngineKey) -> int:
        """Tokens at the start of the chain that the engine has probably kept."""
        known = 0
        for prefix in chain:
            if (prefix, engine) not in self._seen:
                break
            known += 1
        return known * CHUNK_TOKENS
