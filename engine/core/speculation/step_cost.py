"""The cost of drafts: the time of steps without any, and the time that each draft adds, as measured lately.

    seconds of a step = plain(requests) + drafts * added(tokens)

`plain` is the base for what speculation gains or loses, so it is measured for about each number of requests. Between
two numbers for which it is known it is estimated, as while the requests of a batch end one after the other. On a device
that works while the next step is planned, the time between the ends of two steps of different kinds is that of neither;
so a step without drafts counts if the one before it had none either and the next one is launched quickly, and others
only until there is such a one. `added` is interpolated between the sizes that were measured. Without a measurement, a
draft is taken to cost as much as a request. Where memory bandwidth bounds a step it costs far less, as a first try
shows.

Sizes within a fifth of each other share a measurement, so memory is bounded: 4 entries for each doubling.

A figure that one delayed step made too high misleads for long: too high an `added` keeps away the drafts that would
correct it, and beside too high a `plain` every draft looks cheap. So both are forgotten when up to 2 * `_KEPT_STEPS`
steps have not measured them again. What is faster than known weighs more than what is slower, and a `plain` of more
than `_MOST_TIMES` the new measurement is replaced by it.
"""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass

_NEWEST = 0.2  # weight of a new measurement against all older ones
_FASTER = 0.5  # the same for steps without drafts and for guesses that took less time: no disturbance makes them faster
_MOST_TIMES = 2.0  # the most that a measurement counts for, as a multiple of the expected time
_TRUSTED = 2  # measurements; with fewer, the time may be an outlier
_KEPT_STEPS = 512  # times are then measured anew, also because sequences have become longer or shorter
_REACH = 4.0  # an added time is also used for steps with up to this multiple of the tokens


def _bin(size: int) -> int:
    return round(4 * math.log2(size))


def _size_of(number: int) -> float:
    return 2.0 ** (number / 4)


@dataclass(slots=True)
class _Plain:
    """Steps without drafts."""

    seconds: float
    is_exact: bool  # else only steps beside others are known
    count: int = 0
    noted: int = 0  # number of the newest such step, among all steps


class StepCost:
    """The time of steps, and of drafts in them."""

    def __init__(self) -> None:
        self._plain: dict[int, _Plain] = {}  # by the bin of the number of requests
        self._num_noted = 0  # steps
        self._added: dict[int, float] = {}  # seconds of one draft, by the bin of the step's tokens
        self._bins: list[int] = []  # the keys of `_added`, in order
        self._measured: set[int] = set()  # those measured in the present `_KEPT_STEPS` steps
        self._guess: dict[int, float] = {}  # seconds of one guess for each request, by the bin of their number

    def plain_s(self, num_requests: int) -> float | None:
        """Return the time of a step without drafts; None if neither it nor fewer and more requests were measured."""
        size = _bin(num_requests)
        if self._is_known(size):
            return self._plain[size].seconds
        known = sorted(filter(self._is_known, self._plain))
        above = bisect(known, size)
        if above in (0, len(known)):
            return None
        low, high = known[above - 1 : above + 1]
        share = (num_requests - _size_of(low)) / (_size_of(high) - _size_of(low))
        return (1 - share) * self._plain[low].seconds + share * self._plain[high].seconds

    def num_plain(self, num_requests: int) -> int:
        """Return how many measurements of about this number of requests `plain_s` rests on; 0: it is an estimate."""
        size = _bin(num_requests)
        return self._plain[size].count if self._is_known(size) else 0

    def _is_known(self, size: int) -> bool:
        plain = self._plain.get(size)
        return plain is not None and plain.count >= _TRUSTED and not self._is_old(plain)

    def _is_old(self, plain: _Plain) -> bool:
        return self._num_noted - plain.noted > _KEPT_STEPS

    def added_s(self, num_tokens: int, request_s: float) -> float:
        """Return the time that one more draft adds to a step of `num_tokens`; `request_s` if it is not known."""
        size = _bin(num_tokens)
        if size in self._added:
            return self._added[size]
        above = bisect(self._bins, size)
        if above == 0:
            return self._added[self._bins[0]] if self._bins else request_s
        low = self._bins[above - 1]
        if above == len(self._bins):
            return self._added[low] if size - low <= 4 * math.log2(_REACH) else request_s
        high = self._bins[above]
        share = (size - low) / (high - low)
        return self._added[low] * (1 - share) + self._added[high] * share

    def guess_s(self, num_requests: int) -> float:
        """Return the time in which a drafter on the device makes one guess for each request; 0 if none was measured."""
        if not self._guess:
            return 0.0
        size = _bin(num_requests)
        return self._guess[min(self._guess, key=lambda known: (abs(known - size), known))]

    def note_guesses(self, num_requests: int, num_guesses: int, seconds: float) -> None:
        """Note the added time of a step that made `num_guesses` for each request, and checked no draft."""
        size, each = _bin(num_requests), max(0.0, seconds) / num_guesses
        known = self._guess.get(size, each)
        self._guess[size] = known + (_FASTER if each < known else _NEWEST) * (each - known)

    def note_plain(self, num_requests: int, seconds: float, *, is_exact: bool = True) -> None:
        """Note the time of a step without drafts.

        `is_exact`: the step before had none either, and no prompts, and launching the next one has not delayed its end.
        """
        self._begin_note()
        size = _bin(num_requests)
        plain = self._plain.get(size)
        if plain is None or self._is_old(plain):
            plain = self._plain[size] = _Plain(seconds, is_exact)
        elif plain.is_exact and not is_exact:
            return
        elif plain.is_exact != is_exact or _MOST_TIMES * seconds < plain.seconds:
            plain.seconds = seconds
        elif plain.count >= _TRUSTED:
            seconds = min(seconds, _MOST_TIMES * plain.seconds)
        plain.is_exact = is_exact
        plain.count += 1
        plain.noted = self._num_noted
        weight = _FASTER if seconds < plain.seconds else _NEWEST
        plain.seconds += max(weight, 1 / plain.count) * (seconds - plain.seconds)

    def longest_s(self, num_requests: int, num_drafts: int, plain_s: float) -> float:
        """Return the longest time that drafts can explain. A step that took longer was delayed by something else."""
        added_s = self.added_s(num_requests + num_drafts, plain_s / num_requests)
        return _MOST_TIMES * (plain_s + num_drafts * added_s)

    def note_drafts(self, num_requests: int, num_drafts: int, seconds: float, plain_s: float) -> None:
        """Note the time of a step with drafts, at most `longest_s`. A few drafts among many requests weigh little."""
        self._begin_note()
        size = _bin(num_requests + num_drafts)
        before = self.added_s(num_requests + num_drafts, plain_s / num_requests)
        if size not in self._added:
            self._bins.insert(bisect(self._bins, size), size)
        per_draft = max(0.0, seconds - plain_s) / num_drafts
        weight = min(1.0, num_drafts / num_requests) * (_NEWEST if size in self._added else 1.0)
        self._added[size] = before + weight * (per_draft - before)
        self._measured.add(size)

    def _begin_note(self) -> None:
        """Count a step, and forget what a draft adds to steps of sizes that were not measured lately."""
        self._num_noted += 1
        if self._num_noted % _KEPT_STEPS == 0:
            self._bins = sorted(self._measured)
            self._added = {size: self._added[size] for size in self._bins}
            self._measured.clear()
