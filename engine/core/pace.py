"""Measured times of work: straight lines fitted to recent times of steps, and of reads of other engines' blocks.

    seconds = (base_s + unit_s * units) * factor       prompt tokens of a step, requests that decode in it, blocks read

The line is the work's shape, the factor how fast it goes now: the median of what the newest measurements took over what
the line says. So one outlier changes nothing, and a lasting change is known after a few.

Measurements age. Those more than `STALE_S` older than the newest one are stale: `SETTLED` fresh ones outvote them, and
a single one does where it shows that work goes faster. Disturbances make work slower and never faster, so such a
measurement needs no second one to confirm it.

Memory is bounded: measurements of alike sizes (within a power of two) are one point of the line. A point moves by a
fifth of the way to each new measurement, of which no more than `MOST_TIMES` the expected is believed. Old points count
less than new ones.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

KEPT = 0.8  # of a point, with each further measurement
MOST_TIMES = 3.0  # the expected: what took longer counts as that
HALF_LIFE_S = 60.0  # of a point's weight beside a newer one
STALE_S = 60.0  # after which a measurement may no longer show how fast work goes
SETTLED = 3  # measurements, whose median leaves out one outlier
NEWEST = 5  # measurements, whose median says how fast work goes now
SPREAD = 3.0  # the largest batch over the smallest: below it, a step's share of one request is not known
RENEWED_S = 0.1  # between two looks at the steps of an engine


class Line(msgspec.Struct, frozen=True):
    """The time of work by its size."""

    base_s: float
    unit_s: float

    def at(self, units: float) -> float:
        return self.base_s + self.unit_s * units

    def times(self, factor: float) -> Line:
        return Line(self.base_s * factor, self.unit_s * factor)


@dataclass(slots=True)
class _Point:
    units: float
    seconds: float
    measured_s: float

    def move(self, units: float, seconds: float, now_s: float) -> None:
        expected_s = self.seconds * units / self.units
        seconds = min(seconds, MOST_TIMES * expected_s)
        self.units = KEPT * self.units + (1 - KEPT) * units
        self.seconds = KEPT * self.seconds + (1 - KEPT) * seconds
        self.measured_s = now_s


class _Measurement(NamedTuple):
    units: int
    seconds: float
    measured_s: float


class LineFit:
    """Fits a line to measurements; neither its base nor its slope is below 0."""

    def __init__(self) -> None:
        self._points: dict[int, _Point] = {}  # by bits of the size
        self._newest: deque[_Measurement] = deque(maxlen=NEWEST)
        self.num_measured = 0

    def add(self, units: int, seconds: float, now_s: float) -> None:
        """Note that `units`, of which there is one at least, took so long."""
        if seconds <= 0:  # below the clock's resolution
            return
        self._newest.append(_Measurement(units, seconds, now_s))
        self.num_measured += 1
        bits = units.bit_length()
        if (point := self._points.get(bits)) is None:
            self._points[bits] = _Point(units, seconds, now_s)
        else:
            point.move(units, seconds, now_s)

    @property
    def num_points(self) -> int:
        """Return the number of points that the line is fitted to."""
        return len(self._points)

    @property
    def spread(self) -> float:
        """Return the largest size over the smallest; 0 where nothing was measured."""
        sizes = [point.units for point in self._points.values()]
        return max(sizes) / min(sizes) if sizes else 0.0

    @property
    def is_settled(self) -> bool:
        """Return whether so much was measured that one outlier does not decide."""
        return len(self._newest) >= SETTLED

    @property
    def newest_s(self) -> float | None:
        """Return the median of the newest measurements, whatever their sizes; None where nothing was measured."""
        return self._present(lambda each: each.seconds) if self._newest else None

    def line(self) -> Line | None:
        """Return the line at the present speed; None where nothing was measured."""
        if not self._points:
            return None
        shape = self._shape()
        return shape.times(self._present(lambda each: each.seconds / shape.at(each.units)))

    @property
    def _fresh(self) -> list[_Measurement]:
        """The newest measurements without the stale ones."""
        newest_s = self._newest[-1].measured_s
        return [each for each in self._newest if newest_s - each.measured_s <= STALE_S]

    def _present(self, figure: Callable[[_Measurement], float]) -> float:
        """Return the median of a figure of the newest measurements: of the fresh ones where they are many or faster."""
        fresh = self._fresh
        median = statistics.median_low(map(figure, fresh))
        if len(fresh) >= SETTLED:
            return median
        return min(median, statistics.median_low(map(figure, self._newest)))

    def _shape(self) -> Line:
        """Return the line with the least squares of relative errors, through 0 where all sizes are alike."""
        points = list(self._points.values())
        newest_s = max(point.measured_s for point in points)
        ones = xs = xxs = ys = xys = 0.0
        for point in points:
            weight = 0.5 ** ((newest_s - point.measured_s) / HALF_LIFE_S) / point.seconds**2
            ones += weight
            xs += weight * point.units
            xxs += weight * point.units**2
            ys += weight * point.seconds
            xys += weight * point.units * point.seconds
        determinant = ones * xxs - xs * xs
        if determinant <= 1e-9 * ones * xxs:
            return Line(0.0, xys / xxs)
        base_s, unit_s = (xxs * ys - xs * xys) / determinant, (ones * xys - xs * ys) / determinant
        if unit_s < 0:
            return Line(ys / ones, 0.0)
        return Line(base_s, unit_s) if base_s >= 0 else Line(0.0, xys / xxs)


class StepTimes(msgspec.Struct, frozen=True):
    """The times of an engine's steps, as it measured them lately; None where it has not."""

    prefill: Line | None = None  # by prompt tokens of the step; from `SETTLED` measurements on
    decode: Line | None = None  # by requests that decode in it; without a slope while all batches had about one size
    num_prefills: int = 0  # measurements so far
    num_decodes: int = 0


class StepMeter:
    """Measures the steps of one engine, which end in the order of their plans. Times are one clock's of the caller."""

    def __init__(self) -> None:
        self._prefill, self._decode = LineFit(), LineFit()
        self._planned_s: dict[int, float] = {}  # of steps in flight
        self._last_end_s = 0.0
        self._times, self._renewed_s, self._is_renewed = StepTimes(), -RENEWED_S, True

    def planned(self, step: int, now_s: float) -> None:
        self._planned_s[step] = now_s

    def settled(self, step: int, num_prompt_tokens: int, num_decodes: int, now_s: float) -> float:
        """Note a step's end, and return its time. It began when it was planned, or when the one before it ended."""
        began_s, self._last_end_s = max(self._planned_s.pop(step), self._last_end_s), now_s
        seconds = now_s - began_s
        if num_prompt_tokens:
            decodes_s = 0.0 if self._times.decode is None else self._times.decode.unit_s * num_decodes
            self._prefill.add(num_prompt_tokens, seconds - min(decodes_s, seconds / 2), now_s)
        elif num_decodes:
            self._decode.add(num_decodes, seconds, now_s)
        self._is_renewed = False
        return seconds

    def forget(self) -> None:
        """Forget the steps in flight: no result will come."""
        self._planned_s.clear()

    def times(self) -> StepTimes:
        """Return the times as of `RENEWED_S` ago at most."""
        if not self._is_renewed and self._last_end_s - self._renewed_s >= RENEWED_S:
            self._is_renewed, self._renewed_s = True, self._last_end_s
            prefill = self._prefill.line() if self._prefill.is_settled else None
            self._times = StepTimes(prefill, self._decode_line(), self._prefill.num_measured, self._decode.num_measured)
        return self._times

    def _decode_line(self) -> Line | None:
        newest_s = self._decode.newest_s
        if newest_s is None or self._decode.spread >= SPREAD:
            return self._decode.line()
        return Line(newest_s, 0.0)
