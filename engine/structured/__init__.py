"""Outputs that fit a grammar: JSON schemas, regular expressions, choices, EBNF.

docs/reference/structured_outputs.md says which parts of each are taken.

grammars.py      what the scheduler asks: grammars and their masks
cache.py         the compiled ones, those that cannot be, and those that take long
compiler.py      a process that compiles them, from outside
turns.py         threads that use it one after the other
compiling.py     the same from inside: limits, xgrammar's compiler, and what it would not keep
schemas.py       parts of JSON Schema that would be ignored, and are refused
frames.py        messages between the processes
"""

from __future__ import annotations

from .frames import Limits, Vocabulary
from .grammars import Grammars

__all__ = ["Grammars", "Limits", "Vocabulary"]
