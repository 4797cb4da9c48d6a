"""Slices of the tests marked `exhaustive`: a run takes one; as many runs as there are slices take all tests."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """Slice `number` of `count`; numbers begin at 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Slice:
        """Read NUMBER/COUNT. Raises `ValueError` for anything else."""
        number, _, count = text.partition("/")
        if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
            raise ValueError(f"{text!r} is no slice: give NUMBER/COUNT, from 1/COUNT to COUNT/COUNT")
        return cls(int(number), int(count))

    def of(self, node_ids: Iterable[str]) -> set[str]:
        """Choose among the cases of each test function: every `count`th, in the order of their hashes.

        A function with fewer cases than there are slices is in some slices only, with one case each. The function's
        name decides where its first slice begins, so that no slice gets the larger part of all functions.
        """
        functions = defaultdict(list)
        for node_id in node_ids:
            functions[node_id.partition("[")[0]].append(node_id)
        chosen = set[str]()
        for function, cases in functions.items():
            first = (self.number + _hash(function)) % self.count % len(cases)
            chosen |= set(sorted(cases, key=_hash)[first :: self.count])
        return chosen


def _hash(text: str) -> int:
    """Return a hash that is the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
