"""Grammars by xgrammar. Implements `engine.core.grammar`."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.grammar import GrammarRefused, GrammarStats
from ..core.sampling import StructuredOutputsParams
from .cache import GrammarCache
from .compiler import CompilerClosed, CompilerFailed, GrammarCompiler
from .frames import Limits, Vocabulary

if TYPE_CHECKING:
    import xgrammar

logger = logging.getLogger(__name__)

# xgrammar 0.2.8 lets strings with minLength or maxLength hold what JSON forbids. As space between the parts
# of an answer nobody misses tabs, and line breaks are kept out of strings.
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_BOUNDED = re.compile(r"(min|max)Length")

STARTING_THREAD = "baton-grammars-start"

Words = NDArray[np.int32]  # token t is in where bit t % 32 of word t // 32 is set


class Grammars:
    """Compiles each grammar once, as long as the cache holds it. Any thread may call everything.

    Nothing is loaded or started before `start`, or else the first grammar.
    """

    def __init__(self, vocabulary: Vocabulary, limits: Limits = Limits()) -> None:
        self._vocabulary = vocabulary
        self._compiler = GrammarCompiler(vocabulary, limits)
        self._cache = GrammarCache()
        self._turn = threading.Lock()  # to compile, and for what follows
        self._compile_s = 0.0
        self._tokenizer_info: xgrammar.TokenizerInfo | None = None
        self._printable: Words | None = None

    def start(self) -> None:
        """Returns at once; a thread starts the compiler and loads what the first grammar would wait for."""
        threading.Thread(target=self._start, name=STARTING_THREAD, daemon=True).start()

    def _start(self) -> None:
        try:
            with self._turn:
                self._vocabulary_as_xgrammar()
        except GrammarRefused as refused:
            logger.info("no output can be structured: %s", refused)  # and whoever asks for one is told so
        except CompilerClosed:
            return  # nobody asks any more
        except (CompilerFailed, OSError) as failure:  # OSError: no memory for another process
            logger.warning("the compiler of grammars is started again with the first one: %s", failure)

    def open(self, asked: StructuredOutputsParams) -> Matcher:
        """See `GrammarSource.open`."""
        key = msgspec.msgpack.encode(asked)
        compiled = self._cache.get(key)
        if compiled is None:
            with self._turn:  # several may ask for the same at once: the first compiles for all
                compiled = self._cache.get(key) or self._compile(asked, key)
        import xgrammar

        allowed = self._without_control_characters() if _has_bounded_strings(asked) else None
        return Matcher(xgrammar.GrammarMatcher(compiled), self._vocabulary.vocab_size, allowed)

    def stats(self) -> GrammarStats:
        cache = self._cache
        return GrammarStats(cache.num_compiled, cache.num_refused, cache.num_hits, self._compile_s)

    def close(self) -> None:
        self._compiler.close()

    def _compile(self, asked: StructuredOutputsParams, key: bytes) -> xgrammar.CompiledGrammar:
        began_s = time.monotonic()
        try:
            serialized = self._compiler.compile(asked)
        except GrammarRefused as refused:
            self._cache.refuse(key, str(refused))
            raise
        finally:
            self._compile_s += time.monotonic() - began_s
        info = self._vocabulary_as_xgrammar()
        import xgrammar

        compiled = xgrammar.CompiledGrammar.deserialize_json(serialized, info)
        self._cache.keep(key, compiled)
        return compiled

    def _vocabulary_as_xgrammar(self) -> xgrammar.TokenizerInfo:
        """In this thread's turn. Raises `GrammarRefused` for tokenizers without bytes, and `CompilerFailed`."""
        if self._tokenizer_info is None:
            serialized = self._compiler.tokenizer_info()
            import xgrammar  # about a second, with transformers

            self._tokenizer_info = xgrammar.TokenizerInfo.deserialize_json(serialized)
        return self._tokenizer_info

    def _without_control_characters(self) -> Words:
        if self._printable is None:
            assert self._tokenizer_info is not None
            fits = np.zeros(-(-self._vocabulary.vocab_size // 32) * 32, np.uint8)
            pieces = self._tokenizer_info.decoded_vocab
            fits[: len(pieces)] = [_CONTROL.search(piece) is None for piece in pieces]
            self._printable = np.packbits(fits, bitorder="little").view("<i4").astype(np.int32)
        return self._printable


def _has_bounded_strings(asked: StructuredOutputsParams) -> bool:
    text = asked.json if isinstance(asked.json, str) else asked.structural_tag
    return text is not None and _BOUNDED.search(text) is not None


class Matcher:
    """The grammar of one output. Implements `engine.core.grammar.Grammar`."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, vocab_size: int, allowed: Words | None = None) -> None:
        """Only tokens of the bits `allowed` are ever in a mask."""
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._allowed = allowed

    def advance(self, token_ids: Sequence[int]) -> bytes:
        """See `Grammar.advance`."""
        for token_id in token_ids:
            if not self._matcher.accept_token(token_id):
                raise GrammarRefused(f"token {token_id} does not fit: the output was begun under another grammar")
        words = np.full((1, self._num_words), -1, np.int32)
        self._matcher.fill_next_token_bitmask(words)
        if self._allowed is not None:
            words &= self._allowed
        if not words.any():
            raise GrammarRefused("no token of the vocabulary may follow")
        return words.astype("<i4").tobytes()
