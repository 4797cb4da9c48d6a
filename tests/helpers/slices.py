"""Slices of the tests marked `exhaustive`: a run takes one; as many runs as there are slices take all tests."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

MOST_APART = 3  # slices: of so many in a row, one at least has a case of a function


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
        """Choose this slice's share of the cases of each test function, in the order of their hashes.

        All slices have as many cases of a function, or one more or less. Of a function with few cases, one in
        `MOST_APART` slices in a row has a case at least, so that each case is in one slice, or in several. The
        function's name decides which slice has its first cases, so that no slice gets the larger part of all functions.
        """
        functions = defaultdict(list)
        for node_id in node_ids:
            functions[node_id.partition("[")[0]].append(node_id)
        chosen = set[str]()
        for function, cases in functions.items():
            cases.sort(key=_hash)
            runs = max(len(cases), -(-self.count // MOST_APART))  # of all slices together
            place = (self.number + _hash(function)) % self.count
            share = range(place * runs // self.count, (place + 1) * runs // self.count)
            chosen |= {cases[run % len(cases)] for run in share}
        return chosen


def _hash(text: str) -> int:
    """Return a hash that is the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
