"""Grammars by xgrammar. Implements `engine.core.grammar`.

open ──> known? ──no──> quick compiler ──longer than QUICK_S──> slow compiler ──longer than its limit──> refused

Each compiler is a process that compiles one grammar at a time, first come, first served. A slow grammar in front
therefore delays an ordinary one by `QUICK_S` and the start of a process, not by the slow compiler's whole limit.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..core.grammar import GrammarRefused, GrammarStats
from ..core.sampling import StructuredOutputsParams
from .compiler import Abandoned, CompilerClosed, CompilerFailed, CompilesTooSlowly, GrammarCompiler, always
from .compiler_messages import CompileLimits, GrammarVocabulary
from .output_grammar import OutputGrammar, TokenMask

if TYPE_CHECKING:
    import xgrammar

logger = logging.getLogger(__name__)

# xgrammar 0.2.8 allows control characters in strings with minLength or maxLength, which is invalid JSON. Such grammars
# exclude these bytes everywhere. That also forbids tabs between JSON tokens, which answers do not need. Line breaks are
# not in the set: xgrammar itself excludes them within strings.
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_BOUNDED = re.compile(r"(min|max)Length")

QUICK_S = 2  # grammars that take longer are compiled by the slow compiler

STARTING_THREAD = "baton-grammars-start"


class XGrammarBackend:
    """Compiles grammars and caches them. Methods may be called by any thread.

    The process for slow grammars runs only while it compiles one. Nothing is loaded or started before `start` or the
    first grammar.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        limits: CompileLimits = CompileLimits(),
        *,
        quick: GrammarCompiler | None = None,
        slow: GrammarCompiler | None = None,
    ) -> None:
        """`quick` and `slow` replace the compilers that would be made with `limits`."""
        self._vocabulary = vocabulary
        quick_limits = CompileLimits(min(QUICK_S, limits.compile_s), limits.memory_bytes)
        self._quick = quick or GrammarCompiler(vocabulary, quick_limits)
        self._slow = slow or GrammarCompiler(vocabulary, limits)
        self._cache = GrammarCache()
        self._tokenizer_info: xgrammar.TokenizerInfo | None = None
        self._printable: TokenMask | None = None
        self._pieces: list[bytes] | None = None

    def start(self) -> None:
        """Return at once, and let a thread start the compiler and load everything that the first grammar needs."""
        threading.Thread(target=self._start, name=STARTING_THREAD, daemon=True).start()

    def _start(self) -> None:
        try:
            with self._quick.turn():
                self._vocabulary_as_xgrammar(self._quick)
        except GrammarRefused as refused:
            logger.info(
                "no output can be structured: %s", refused.detail or refused
            )  # requests with a grammar get the same reason
        except CompilerClosed:
            return  # the engine is shutting down
        except (CompilerFailed, OSError) as failure:  # OSError: for example no memory for another process
            logger.warning("the compiler of grammars is started again with the first one: %s", failure)

    def knows(self, asked: StructuredOutputsParams) -> bool:
        """Implement `GrammarSource.knows`."""
        return self._cache.knows(msgspec.msgpack.encode(asked))

    def open(self, asked: StructuredOutputsParams, is_wanted: Callable[[], bool] = always) -> OutputGrammar:
        """Implement `GrammarSource.open`."""
        key = msgspec.msgpack.encode(asked)
        compiled = self._cache.get(key) or self._compile(asked, key, is_wanted)
        import xgrammar

        allowed = self._without_control_characters() if _has_bounded_strings(asked) else None
        matcher = xgrammar.GrammarMatcher(compiled)
        return OutputGrammar(matcher, self._vocabulary.vocab_size, self._token_bytes, allowed)

    def stats(self) -> GrammarStats:
        cache = self._cache
        compile_s = self._quick.compile_s + self._slow.compile_s
        return GrammarStats(cache.num_compiled, cache.num_refused, cache.num_hits, compile_s)

    def close(self) -> None:
        self._quick.close()
        self._slow.close()

    def _compile(
        self, asked: StructuredOutputsParams, key: bytes, is_wanted: Callable[[], bool]
    ) -> xgrammar.CompiledGrammar:
        """Return the compiled grammar. If several requests need it at once, the first one compiles it for all."""
        with self._quick.turn():
            if (known := self._cache.get(key)) is not None:
                return known
            if not is_wanted():
                raise Abandoned
            if not self._cache.is_slow(key):
                try:  # never abandoned: restarting the process would take as long as finishing
                    return self._compile_by(self._quick, asked, key, always)
                except CompilesTooSlowly:
                    self._cache.note_slow(key)
        with self._slow.turn():
            if (known := self._cache.get(key)) is not None:
                return known
            try:
                return self._compile_by(self._slow, asked, key, is_wanted)
            except CompilesTooSlowly as slow:
                refused = GrammarRefused(str(slow))
                self._cache.put_refusal(key, refused)
                raise refused from None
            finally:
                self._slow.stop()

    def _compile_by(
        self, compiler: GrammarCompiler, asked: StructuredOutputsParams, key: bytes, is_wanted: Callable[[], bool]
    ) -> xgrammar.CompiledGrammar:
        """Compile while this thread has the turn, and cache the result."""
        try:
            serialized = compiler.compile(asked, is_wanted)
        except GrammarRefused as refused:
            self._cache.put_refusal(key, refused)
            raise
        info = self._vocabulary_as_xgrammar(compiler)
        import xgrammar

        compiled = xgrammar.CompiledGrammar.deserialize_json(serialized, info)
        self._cache.put(key, compiled)
        return compiled

    def _vocabulary_as_xgrammar(self, compiler: GrammarCompiler) -> xgrammar.TokenizerInfo:
        """Return xgrammar's tokenizer info. The thread must have the compiler's turn.

        Raises `GrammarRefused` for tokenizers whose tokens have no fixed bytes, and `CompilerFailed`.
        """
        if self._tokenizer_info is None:
            serialized = compiler.tokenizer_info()
            import xgrammar  # takes about a second: it imports transformers

            self._tokenizer_info = xgrammar.TokenizerInfo.deserialize_json(serialized)
        return self._tokenizer_info

    def _without_control_characters(self) -> TokenMask:
        if self._printable is None:
            fits = np.zeros(-(-self._vocabulary.vocab_size // 32) * 32, np.uint8)
            pieces = self._token_bytes()
            fits[: len(pieces)] = [_CONTROL.search(piece) is None for piece in pieces]
            self._printable = np.packbits(fits, bitorder="little").view("<i4").astype(np.int32)
        return self._printable

    def _token_bytes(self) -> list[bytes]:
        """Return the bytes of each token. A grammar must have been compiled before."""
        if self._pieces is None:
            assert self._tokenizer_info is not None
            self._pieces = self._tokenizer_info.decoded_vocab
        return self._pieces


def _has_bounded_strings(asked: StructuredOutputsParams) -> bool:
    text = asked.json if isinstance(asked.json, str) else asked.structural_tag
    return text is not None and _BOUNDED.search(text) is not None


CACHE_BYTES = 256 << 20  # compiled grammars; the least recently used are evicted
MOST_SLOW = 256  # number of slow grammars that are remembered
MOST_REFUSALS = 256  # number of refusals that are remembered, so that repeated ones do not block the compiler ...
REFUSAL_S = 60.0  # ... for this long


class GrammarCache:
    """Compiled grammars by their encoded `StructuredOutputsParams`. Methods may be called by any thread."""

    def __init__(self) -> None:
        self.num_hits = self.num_compiled = self.num_refused = 0
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, xgrammar.CompiledGrammar] = OrderedDict()
        self._num_bytes = 0
        self._refused: OrderedDict[bytes, tuple[GrammarRefused, float]] = OrderedDict()  # reason, expiry time
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
