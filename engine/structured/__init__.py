"""Structured outputs: answers that match a JSON schema, a regular expression, a choice or an EBNF grammar.

docs/reference/structured_outputs.md says which parts of each are supported.

xgrammar_backend.py    `GrammarSource` of the scheduler; the cache of compiled and refused grammars
output_grammar.py      the grammar of one output: token masks for the next token and after draft tokens
compiler.py            the client of a compiler process, with a FIFO lock for its threads
compiler_process.py    the compiler process: its limits, and xgrammar's compiler
schema_checks.py       keywords of JSON Schema that xgrammar ignores, and Baton refuses
compiler_messages.py   messages between the two processes
"""

from __future__ import annotations

from .compiler_messages import CompileLimits, GrammarVocabulary
from .xgrammar_backend import XGrammarBackend

__all__ = ["CompileLimits", "GrammarVocabulary", "XGrammarBackend"]
