"""The grammar backend without an engine: masks, refusals, and limits of the compiler process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from baton.engine import StructuredOutputsParams
from baton.engine.core.grammar import GrammarRefused, GrammarStats
from baton.engine.structured import (
    CompileLimits,
    GrammarVocabulary,
    XGrammarBackend,
    compiler,
    xgrammar_backend,
)
from baton.engine.structured.compiler import GrammarCompiler
from baton.engine.structured.compiler_messages import CompilerSetup, write_frame
from baton.engine.structured.xgrammar_backend import STARTING_THREAD, GrammarCache
from baton.engine.text import Tokenizer

from ...helpers.structured_cases import CASES, CHOICES

if TYPE_CHECKING:
    import xgrammar


@pytest.fixture(scope="module")
def tokenizer(vocabulary: GrammarVocabulary) -> Tokenizer:
    return Tokenizer.from_folder(vocabulary.tokenizer)


def tokens_of(mask: bytes) -> set[int]:
    return set(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0].tolist())


@pytest.mark.slow
def test_a_mask_has_exactly_the_tokens_that_can_be_continued(grammars: XGrammarBackend, tokenizer: Tokenizer) -> None:
    grammar = grammars.open(StructuredOutputsParams(choice=CHOICES))
    output, choices = b"", [choice.encode() for choice in CHOICES]
    drawn: list[int] = []
    while True:
        allowed = tokens_of(grammar.advance(drawn))
        pieces = {token: tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}
        fitting = {
            token
            for token, piece in pieces.items()
            if piece and token not in tokenizer.special_token_ids
            if any(choice.startswith(output + piece) for choice in choices)
        }
        assert allowed == (fitting | {0} if output in choices else fitting)
        if allowed == {0}:
            return
        drawn = [max(fitting, key=lambda token: pieces[token])]
        output += pieces[drawn[0]]


def test_an_output_can_be_continued_from_any_token(grammars: XGrammarBackend, tokenizer: Tokenizer) -> None:
    asked = CASES["json"].asked
    text = '{"name": "a😀", "age": 15, "tags": ["red"], "home": {"zip": "01234"}}'
    tokens = tokenizer.encode(text, add_special_tokens=False)
    whole = grammars.open(asked)
    masks = [whole.advance([]), *(whole.advance([token]) for token in tokens)]
    for cut in range(len(tokens) + 1):
        assert grammars.open(asked).advance(tokens[:cut]) == masks[cut]
    assert tokens_of(masks[-1]) == {0}


def test_a_token_that_does_not_fit_is_refused(grammars: XGrammarBackend, tokenizer: Tokenizer) -> None:
    grammar = grammars.open(StructuredOutputsParams(choice=["yes"]))
    (wrong,) = tokenizer.encode("n", add_special_tokens=False)
    with pytest.raises(GrammarRefused, match=f"does not allow token {wrong}"):
        grammar.advance([wrong])
    for special in (1, 390):  # padding of two kinds
        with pytest.raises(GrammarRefused):
            grammars.open(StructuredOutputsParams(regex=".*")).advance([special])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "[a-"}, "Unclosed"),
    "lookahead": ({"regex": "(?=a)b"}, "Lookahead"),
    "deep": ({"regex": "(" * 50_000 + "a" + ")" * 50_000}, "maximum limit"),
    "grammar": ({"grammar": "root ::= nowhere"}, '"nowhere" is not defined'),
    "no root": ({"grammar": 'start ::= "a"'}, "root"),
    "type": ({"json": {"type": "integr"}}, "integr"),
    "no json": ({"json": "{"}, "not JSON"),
    "no schema": ({"json": "3"}, "."),
    "reference": ({"json": {"$ref": "#/$defs/gone"}}, "gone"),
    "ignored by the compiler": ({"json": {"type": "string", "pattern": "a", "minLength": 3}}, "pattern combined"),
    "unions that overlap": ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
    "tag": ({"structural_tag": "{}"}, "format"),
    "no tag": ({"structural_tag": "<a>"}, "not JSON"),
}


@pytest.mark.parametrize(("asked", "reason"), REFUSED.values(), ids=REFUSED)
def test_grammars_that_cannot_be_compiled_are_refused_with_the_reason(
    grammars: XGrammarBackend, asked: dict[str, Any], reason: str
) -> None:
    with pytest.raises(GrammarRefused, match=reason) as refused:
        grammars.open(StructuredOutputsParams(**asked))
    assert "/cpp/" not in str(refused.value), "the message must not name the compiler's source files"


SLOW = "|".join(f"(a{{{i}}}b{{{i}}}[c-z]{{1,{i}}}){{1,50}}" for i in range(1, 1500))
LIMITS = {
    "takes longer than 1 s": CompileLimits(compile_s=1),
    "needs more memory": CompileLimits(memory_bytes=100 << 20),
}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("reason", "limits"), LIMITS.items())
def test_a_grammar_over_the_limits_is_refused_and_the_next_is_compiled(
    vocabulary: GrammarVocabulary, reason: str, limits: CompileLimits
) -> None:
    source = XGrammarBackend(vocabulary, limits)
    with pytest.raises(GrammarRefused, match=reason):
        source.open(StructuredOutputsParams(regex=SLOW))
    source.open(StructuredOutputsParams(choice=["a"])).advance([])
    source.close()


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.slow
def test_other_grammars_are_compiled_while_a_slow_one_is(vocabulary: GrammarVocabulary) -> None:
    quick, slow = (GrammarCompiler(vocabulary, CompileLimits(limit_s)) for limit_s in (1, 60))
    source = XGrammarBackend(vocabulary, quick=quick, slow=slow)
    asked = StructuredOutputsParams(regex=SLOW)
    is_wanted = threading.Event()
    is_wanted.set()
    with ThreadPoolExecutor(2) as threads:
        opening = [threads.submit(source.open, asked, is_wanted.is_set) for _ in range(2)]
        until(lambda: slow.num_in_line == 2)
        for choice in ("a", "b"):
            source.open(StructuredOutputsParams(choice=[choice])).advance([])
        assert not any(each.done() for each in opening)
        until(lambda: slow.process_id is not None)
        process = Path(f"/proc/{slow.process_id}")
        assert process.exists()
        is_wanted.clear()
        assert [type(each.exception(60.0)) for each in opening] == [compiler.Abandoned] * 2
    assert not process.exists(), "the process of an abandoned grammar must end"
    assert source.stats()[:2] == (2, 0), "an abandoned grammar must not count as refused"
    assert source.knows(StructuredOutputsParams(choice=["a"]))
    assert not source.knows(asked)
    source.close()


def test_a_compiler_whose_engine_has_ended_ends_without_output(vocabulary: GrammarVocabulary) -> None:
    command = [sys.executable, "-m", "baton.engine.structured.compiler_process"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        write_frame(process.stdin, CompilerSetup(vocabulary, CompileLimits()))
        told = process.stderr.read()
    assert (process.returncode, told) == (0, b"")


class RefusingCompiler(GrammarCompiler):
    """A compiler that records each regular expression and raises `refusal`."""

    def __init__(self, vocabulary: GrammarVocabulary, refusal: Exception) -> None:
        super().__init__(vocabulary)
        self.asked: list[str] = []
        self.refusal = refusal

    def compile(self, asked: StructuredOutputsParams, is_wanted: Callable[[], bool] = compiler.always) -> str:
        self.asked.append(str(asked.regex))
        raise self.refusal


def test_a_slow_grammar_is_tried_only_once_by_the_quick_compiler(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, slow = (RefusingCompiler(vocabulary, compiler.CompilesTooSlowly("takes longer")) for _ in range(2))
    source = XGrammarBackend(vocabulary, quick=quick, slow=slow)
    monkeypatch.setattr(xgrammar_backend, "REFUSAL_S", 0.0)
    for times in (1, 2):
        with pytest.raises(GrammarRefused, match="takes longer"):
            source.open(StructuredOutputsParams(regex="a"))
        assert (quick.asked, slow.asked) == (["a"], ["a"] * times)


def test_grammars_are_compiled_in_order_and_not_for_abandoned_requests(vocabulary: GrammarVocabulary) -> None:
    quick = RefusingCompiler(vocabulary, GrammarRefused("not today"))
    source = XGrammarBackend(vocabulary, quick=quick)
    asked = [StructuredOutputsParams(regex=str(number)) for number in range(16)]
    with ThreadPoolExecutor(16) as threads, quick.turn():
        for number, each in enumerate(asked):
            wanted = number % 3 != 0
            threads.submit(source.open, each, lambda wanted=wanted: wanted)
            until(lambda before=number + 1: quick.num_in_line == before + 1)
    assert quick.asked == [str(number) for number in range(16) if number % 3 != 0]


class FailingOnce(GrammarCompiler):
    """A compiler that refuses the first grammar after `fail_next` was set."""

    fail_next = False

    def compile(self, asked: StructuredOutputsParams, is_wanted: Callable[[], bool] = compiler.always) -> str:
        if self.fail_next:
            self.fail_next = False
            raise GrammarRefused("too slow on a busy machine")
        return super().compile(asked, is_wanted)


@pytest.mark.slow
def test_cached_grammars_and_refusals_are_not_compiled_again(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = FailingOnce(vocabulary)
    source = XGrammarBackend(vocabulary, quick=quick)
    good, bad = StructuredOutputsParams(choice=["a"]), StructuredOutputsParams(regex="(")
    with ThreadPoolExecutor(4) as threads:  # as with n = 4
        (mask,) = {matcher.advance([]) for matcher in threads.map(source.open, [good] * 4)}
    with pytest.raises(GrammarRefused) as first:
        source.open(bad)
    assert source.stats()[:3] == (1, 1, 3)
    compile_s = source.stats().compile_s
    assert compile_s > 0
    assert source.open(StructuredOutputsParams(choice=["a"])).advance([]) == mask
    with pytest.raises(GrammarRefused, match="Regex") as second:
        source.open(bad)
    assert str(first.value) == str(second.value)
    assert source.stats() == GrammarStats(1, 1, 5, compile_s), "nothing must be compiled again"
    monkeypatch.setattr(xgrammar_backend, "REFUSAL_S", 0.0)
    unlucky, quick.fail_next = StructuredOutputsParams(choice=["b"]), True
    with pytest.raises(GrammarRefused, match="busy machine"):
        source.open(unlucky)
    assert source.open(unlucky).advance([]) != mask, "a refusal must not be cached for ever"
    source.close()


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgrammar_backend, "CACHE_BYTES", 100)
    monkeypatch.setattr(xgrammar_backend, "MOST_REFUSALS", 3)
    cache = GrammarCache()
    sizes = {f"grammar {size}".encode(): size for size in (20, 30, 10, 40, 25, 35, 15)}
    for key, size in sizes.items():
        cache.put(key, cast("xgrammar.CompiledGrammar", SimpleNamespace(memory_size_bytes=size)))
        cache.put_refusal(b"no " + key, GrammarRefused("no"))
    keys = list(sizes)
    assert [key for key in keys if cache.knows(key)] == keys[4:], (
        "these take 25 + 35 + 15 of 100 bytes, so 40 more do not fit"
    )
    assert [key for key in keys if cache.knows(b"no " + key)] == keys[4:], "the last three refusals must be kept"
    cache.put(b"all", cast("xgrammar.CompiledGrammar", SimpleNamespace(memory_size_bytes=100)))
    assert not any(cache.knows(key) for key in keys)
    assert cache.knows(b"all")
    cache.put(b"more than all", cast("xgrammar.CompiledGrammar", SimpleNamespace(memory_size_bytes=101)))
    assert not cache.knows(b"more than all")


class HeldStart:
    """Starts of compiler processes: the thread that starts one continues only when `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.started, self.go_on = threading.Event(), threading.Event()
        self._popen = subprocess.Popen
        monkeypatch.setattr(compiler.subprocess, "Popen", self._start)

    def _start(self, *args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        self.processes.append(self._popen(*args, **kwargs))
        self.started.set()
        self.go_on.wait(60.0)
        return self.processes[-1]


@pytest.fixture
def held_start(monkeypatch: pytest.MonkeyPatch) -> HeldStart:
    return HeldStart(monkeypatch)


def test_a_compiler_that_starts_while_its_engine_ends_does_not_outlive_it(
    vocabulary: GrammarVocabulary, held_start: HeldStart
) -> None:
    source = XGrammarBackend(vocabulary)
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(source.open, StructuredOutputsParams(choice=["a"]))
        assert held_start.started.wait(60.0)
        source.close()
        held_start.go_on.set()
        with pytest.raises(compiler.CompilerClosed, match="the engine has ended"):
            opening.result(60.0)
    assert held_start.processes[0].poll() is not None


def wait_for_the_starting_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == STARTING_THREAD:
            thread.join(60.0)
            assert not thread.is_alive()


@pytest.mark.slow
def test_first_grammars_wait_for_the_compiler_that_is_started_ahead_and_use_it_and_a_dead_one_is_replaced(
    vocabulary: GrammarVocabulary, held_start: HeldStart
) -> None:
    source = XGrammarBackend(vocabulary)
    source.start()
    with ThreadPoolExecutor(1) as threads:
        assert held_start.started.wait(60.0)
        assert source.stats() == GrammarStats()
        opening = threads.submit(source.open, StructuredOutputsParams(choice=["a"]))
        held_start.go_on.set()
        opening.result(60.0).advance([])
    wait_for_the_starting_thread()
    assert "xgrammar" in sys.modules
    source.open(StructuredOutputsParams(choice=["b"]))
    (process,) = held_start.processes
    assert process.poll() is None
    assert process.stdin is not None
    process.stdin.close()  # as if this process had died
    assert process.wait(60.0) == 0
    source.open(StructuredOutputsParams(choice=["c"]))
    assert len(held_start.processes) == 2
    source.close()


def test_a_compiler_started_ahead_does_not_outlive_an_engine_that_ends_at_once(
    vocabulary: GrammarVocabulary, held_start: HeldStart, caplog: pytest.LogCaptureFixture
) -> None:
    source = XGrammarBackend(vocabulary)
    source.start()
    assert held_start.started.wait(60.0)
    source.close()
    held_start.go_on.set()
    wait_for_the_starting_thread()
    assert held_start.processes[0].poll() is not None
    assert caplog.records == []


@pytest.mark.slow
def test_a_failed_start_ahead_is_logged_once_and_retried(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = XGrammarBackend(vocabulary)
    with monkeypatch.context() as broken:
        broken.setattr(compiler.sys, "executable", "/bin/false")
        source.start()
        wait_for_the_starting_thread()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ended with status 1" in caplog.text
    source.open(StructuredOutputsParams(choice=["a"]))
    source.close()


def test_a_missing_tokenizer_is_named_even_after_a_start_ahead(tmp_path: Path) -> None:
    source = XGrammarBackend(GrammarVocabulary(str(tmp_path / "gone"), 400, [0]))
    source.start()
    wait_for_the_starting_thread()
    with pytest.raises(GrammarRefused, match="cannot read its tokenizer") as refused:
        source.open(StructuredOutputsParams(choice=["a"]))
    assert str(tmp_path) not in str(refused.value)
    assert "tokenizer.json" in refused.value.detail
    source.close()
