"""Cache of compiled grammars, of refusals, and of grammars that are known to compile slowly."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from ..core.grammar import GrammarRefused

if TYPE_CHECKING:
    import xgrammar

CACHE_BYTES = 256 << 20  # of compiled grammars, least recently used first out
MOST_SLOW = 256  # slow grammars that are remembered
MOST_REFUSALS = 256  # refusals that are remembered ...
REFUSAL_S = 60.0  # ... so that repeated requests do not block the compiler for others


class GrammarCache:
    """Compiled grammars by their encoded request. Any thread may call all methods."""

    def __init__(self) -> None:
        self.num_hits = self.num_compiled = self.num_refused = 0
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, xgrammar.CompiledGrammar] = OrderedDict()
        self._num_bytes = 0
        self._refused: OrderedDict[bytes, tuple[GrammarRefused, float]] = OrderedDict()  # reason, and when it expires
        self._slow: OrderedDict[bytes, None] = OrderedDict()

    def get(self, key: bytes) -> xgrammar.CompiledGrammar | None:
        """Return a cached grammar, or None. Raises a cached `GrammarRefused`."""
        with self._lock:
            refused, end_s = self._refused.get(key, (None, 0.0))
            if refused is not None and time.monotonic() < end_s:
                self.num_hits += 1
                raise GrammarRefused(str(refused), refused.place, refused.detail)
            compiled = self._compiled.get(key)
            if compiled is not None:
                self.num_hits += 1
                self._compiled.move_to_end(key)
            return compiled

    def put(self, key: bytes, compiled: xgrammar.CompiledGrammar) -> None:
        """Store a new grammar, unless it is larger than the cache."""
        with self._lock:
            self.num_compiled += 1
            self._compiled[key] = compiled
            self._num_bytes += compiled.memory_size_bytes
            while self._num_bytes > CACHE_BYTES:
                _, oldest = self._compiled.popitem(last=False)
                self._num_bytes -= oldest.memory_size_bytes

    def knows(self, key: bytes) -> bool:
        """Return whether `get` would return a grammar or raise a refusal."""
        with self._lock:
            return key in self._compiled or time.monotonic() < self._refused.get(key, (None, 0.0))[1]

    def is_slow(self, key: bytes) -> bool:
        return key in self._slow

    def note_slow(self, key: bytes) -> None:
        with self._lock:
            self._slow[key] = None
            if len(self._slow) > MOST_SLOW:
                self._slow.popitem(last=False)

    def put_refusal(self, key: bytes, refused: GrammarRefused) -> None:
        with self._lock:
            self.num_refused += 1
            self._refused[key] = (refused, time.monotonic() + REFUSAL_S)
            self._refused.move_to_end(key)
            if len(self._refused) > MOST_REFUSALS:
                self._refused.popitem(last=False)
