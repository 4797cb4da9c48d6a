"""Main module of a compiler process, which compiles grammars one at a time, within limits of time and memory.

A grammar that makes the compiler hang, crash or exhaust its memory harms only this process, not the engine. An alarm
and the memory limit end the process, and the engine starts another one.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from ..core.grammar import GrammarRefused
from ..core.sampling import StructuredOutputsParams
from ..text import TextError, Tokenizer
from .compiler_messages import (
    CompiledReply,
    CompilerReady,
    CompilerSetup,
    GrammarVocabulary,
    RefusedReply,
    read_frame,
    write_frame,
)
from .schema_checks import check_schema, check_structural_tag, parts_of

if TYPE_CHECKING:
    import xgrammar

NICENESS = 5  # an engine on the same cores has priority
_MOST_THREADS = 8
# Time, source line and failed condition in xgrammar's messages.
_SOURCE = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: \(.+?\) is false: )?", re.MULTILINE)
_OUT_OF_MEMORY = "bad_alloc"
_REASON_CHARS = 500  # maximal length of a refusal's reason, which may quote a grammar
_WARNING = re.compile(r"Warning: (.*)")


def main() -> None:
    orders, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print to stdout must not corrupt replies
    os.nice(NICENESS)
    first = read_frame(orders)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=CompilerSetup)
    try:
        info = tokenizer_info(setup.vocabulary)
    except GrammarRefused as refused:
        write_frame(replies, RefusedReply(f"is not supported with this model: {refused}"))
        return
    except TextError as error:  # its message names local files, so it is for the log only
        reason = "is not supported with this model: the engine cannot read its tokenizer"
        write_frame(replies, RefusedReply(reason, detail=str(error)))
        return
    write_frame(replies, CompilerReady(info.serialize_json()))
    limit_memory(setup.limits.memory_bytes)
    serve(orders, replies, info, setup.limits.compile_s)


def tokenizer_info(vocabulary: GrammarVocabulary) -> xgrammar.TokenizerInfo:
    """Return xgrammar's tokenizer info, with the bytes of every token.

    Special tokens and ids beyond the tokenizer have no bytes, so grammars never allow them. Marks that the model puts
    around parts of its answers (tool calls, reasoning) count as text.
    """
    tokenizer = Tokenizer.from_folder(vocabulary.tokenizer)
    if tokenizer.byte_decoder is None:
        raise GrammarRefused("this model's tokenizer does not say which bytes a token stands for")
    import xgrammar  # takes seconds: it imports torch and transformers

    special = tokenizer.special_token_ids - tokenizer.special_ids_of(tokenizer.marks)
    pieces = [b"" if token in special else tokenizer.token_bytes(token) for token in range(vocabulary.vocab_size)]
    return xgrammar.TokenizerInfo(pieces, vocab_size=vocabulary.vocab_size, stop_token_ids=vocabulary.eos_token_ids)


def limit_memory(num_bytes: int) -> None:
    """Limit the memory that the process may allocate from now on."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack, which count towards the limit
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dumps if the compiler crashes


def serve(orders: IO[bytes], replies: IO[bytes], info: xgrammar.TokenizerInfo, limit_s: int) -> None:
    import xgrammar

    threads = min(_MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // 2))
    compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)  # the engine has the cache
    while (order := read_frame(orders)) is not None:
        asked = msgspec.msgpack.decode(order, type=StructuredOutputsParams)
        signal.alarm(limit_s)
        reply = compile_within(compiler, asked)
        signal.alarm(0)
        write_frame(replies, reply)


def compile_within(compiler: xgrammar.GrammarCompiler, asked: StructuredOutputsParams) -> CompiledReply | RefusedReply:
    try:
        with capture_warnings() as warnings:
            grammar = compile_grammar(compiler, asked).serialize_json()
    except GrammarRefused as refused:
        return RefusedReply(f"cannot be enforced: {_cut(str(refused))}", refused.place)
    except (RuntimeError, ValueError) as error:  # raised by xgrammar
        if _OUT_OF_MEMORY in str(error):
            return RefusedReply("needs more memory to compile than it may have: simplify it")
        return RefusedReply(f"cannot be compiled: {_reason(error)}", _broken_part(asked))
    if warnings:
        return RefusedReply(f"would not be kept as it is: {_cut(warnings[0])}", _broken_part(asked))
    return CompiledReply(grammar)


def _reason(error: Exception) -> str:
    """Return xgrammar's message without its place in the source and final full stops, to be used within a sentence."""
    return _cut(_SOURCE.sub("", str(error)).strip().rstrip(".")) or "it is malformed"


def _cut(reason: str) -> str:
    return reason if len(reason) <= _REASON_CHARS else f"{reason[:_REASON_CHARS]}..."


def _broken_part(asked: StructuredOutputsParams) -> str:
    """Return the path of the first part of a structural tag that xgrammar refuses on its own; "" if there is none."""
    if asked.structural_tag is None:
        return ""
    for place, part in parts_of(asked.structural_tag):
        try:
            with capture_warnings() as warnings:
                _parse(part)
        except (RuntimeError, ValueError):
            return place
        if warnings:
            return place
    return ""


def _parse(part: dict[str, Any]) -> None:
    import xgrammar

    match part:
        case {"type": "json_schema", "json_schema": schema}:
            xgrammar.Grammar.from_json_schema(json.dumps(schema))
        case {"type": "regex", "pattern": str(pattern)}:
            xgrammar.Grammar.from_regex(pattern)
        case {"type": "grammar", "grammar": str(grammar)}:
            xgrammar.Grammar.from_ebnf(grammar)


def compile_grammar(compiler: xgrammar.GrammarCompiler, asked: StructuredOutputsParams) -> xgrammar.CompiledGrammar:
    any_whitespace = not asked.disable_any_whitespace
    match asked:
        case StructuredOutputsParams(json=str(schema)):
            check_schema(schema)
            return compiler.compile_json_schema(schema, any_whitespace=any_whitespace)
        case StructuredOutputsParams(json_object=True):
            return compiler.compile_json_schema('{"type": "object"}', any_whitespace=any_whitespace)
        case StructuredOutputsParams(regex=str(pattern)):
            return compiler.compile_regex(pattern)
        case StructuredOutputsParams(choice=list(choices)):
            return compiler.compile_grammar(choice_grammar(choices))
        case StructuredOutputsParams(grammar=str(grammar)):
            return compiler.compile_grammar(grammar)
        case StructuredOutputsParams(structural_tag=str(tag)):
            check_structural_tag(tag)
            return compiler.compile_structural_tag(tag)
    raise AssertionError(f"no compiler for {asked.kind}")


def choice_grammar(choices: list[str]) -> str:
    """Return an EBNF grammar of the choices. EBNF strings have the same escapes as JSON strings."""
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


@contextmanager
def capture_warnings() -> Iterator[list[str]]:
    """Collect xgrammar's warnings from standard error. The yielded list is filled when the context ends."""
    warnings: list[str] = []
    before = os.dup(2)
    with tempfile.TemporaryFile() as stderr:
        os.dup2(stderr.fileno(), 2)
        try:
            yield warnings
        finally:
            os.dup2(before, 2)
            os.close(before)
            stderr.seek(0)
            warnings += _WARNING.findall(stderr.read().decode(errors="replace"))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the engine has ended, and nobody waits for the reply
        os._exit(0)  # at once: an orderly end would try to write what is left of it
