"""Measured times of work: straight lines fitted to recent times of steps, and of reads of other engines' blocks.

    seconds = (base_s + unit_s * units) * factor       prompt tokens of a step, requests that decode in it, blocks read

The line is the shape of the cost; the factor is the present speed: the median, over the newest measurements, of
measured time over the line's time. So one outlier changes nothing, and a lasting change shows after a few measurements.

Measurements age. One that is more than `STALE_S` older than the newest is stale. `SETTLED` fresh ones outvote stale
ones; a single fresh one does so if it shows that work has become faster. Disturbances only make work slower, so a fast
measurement needs no second one to confirm it.

Memory is bounded: measurements of similar sizes (within a power of two) form one point of the line. Each new one moves
the point by a fifth of the distance, and counts as at most `MOST_TIMES` the expected time. Old points weigh less than
new ones, but are not forgotten: the shape would be lost while only one size is measured.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

KEPT = 0.8  # weight that a point keeps with each further measurement
MOST_TIMES = 3.0  # the most that a measurement counts for, as a multiple of the expected time
HALF_LIFE_S = 60.0  # a point that is older than the newest by this has half the weight
MOST_HALVES = 24.0  # ... but no less than 2 ** -24 of it: old sizes show the shape until others are measured
STALE_S = 60.0  # a measurement that is older than the newest by more may not show the present speed
SETTLED = 3  # measurements, enough for a median that ignores one outlier
NEWEST = 5  # measurements whose median is the present speed
SPREAD = 3.0  # largest over smallest batch; below that, the time for each further request of a batch is not known
RENEWED_S = 0.1  # the time after which lines are fitted anew


class Line(msgspec.Struct, frozen=True):
    """The time of work as a function of its size."""

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
    """Fits a line to measurements. Neither its base nor its slope is negative."""

    def __init__(self) -> None:
        self._points: dict[int, _Point] = {}  # by the bit length of the size
        self._newest: deque[_Measurement] = deque(maxlen=NEWEST)
        self.num_measured = 0

    def add(self, units: int, seconds: float, now_s: float) -> None:
        """Add a measurement: `units`, at least one, took `seconds`."""
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
        """The number of points that the line is fitted to."""
        return len(self._points)

    @property
    def spread(self) -> float:
        """The largest size over the smallest; 0 if nothing was measured."""
        sizes = [point.units for point in self._points.values()]
        return max(sizes) / min(sizes) if sizes else 0.0

    @property
    def is_settled(self) -> bool:
        """True if there are enough measurements that one outlier does not decide."""
        return len(self._newest) >= SETTLED

    @property
    def newest_s(self) -> float | None:
        """The median of the newest measurements, whatever their sizes; None if nothing was measured."""
        return self._present(lambda each: each.seconds) if self._newest else None

    def line(self) -> Line | None:
        """Return the line at the present speed; None if nothing was measured."""
        if not self._points:
            return None
        shape = self._shape()
        return shape.times(self._present(lambda each: each.seconds / shape.at(each.units)))

    @property
    def _fresh(self) -> list[_Measurement]:
        """The newest measurements, without stale ones."""
        newest_s = self._newest[-1].measured_s
        return [each for each in self._newest if newest_s - each.measured_s <= STALE_S]

    def _present(self, figure: Callable[[_Measurement], float]) -> float:
        """Return the median of a figure of the newest measurements: of fresh ones, if they are enough or faster."""
        fresh = self._fresh
        median = statistics.median_low(map(figure, fresh))
        if len(fresh) >= SETTLED:
            return median
        return min(median, statistics.median_low(map(figure, self._newest)))

    def _shape(self) -> Line:
        """Return the line with the least squares of relative errors; through 0 if all sizes are equal."""
        points = list(self._points.values())
        newest_s = max(point.measured_s for point in points)
        ones = xs = xxs = ys = xys = 0.0
        for point in points:
            num_halves = min((newest_s - point.measured_s) / HALF_LIFE_S, MOST_HALVES)
            weight = 0.5**num_halves / point.seconds**2
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
    """The recent times of an engine's steps; None for what was not measured."""

    prefill: Line | None = None  # by prompt tokens of the step; None before `SETTLED` measurements
    decode: Line | None = None  # by requests that decode in the step; no slope while all batches had similar sizes
    num_prefills: int = 0  # measurements so far
    num_decodes: int = 0


class StepMeter:
    """Measures the steps of one engine, which end in the order of their plans. All times are by the caller's clock."""

    def __init__(self) -> None:
        self._prefill, self._decode = LineFit(), LineFit()
        self._planned_s: dict[int, float] = {}  # when each step in flight was planned
        self._last_end_s = 0.0
        self._times, self._renewed_s, self._is_renewed = StepTimes(), -RENEWED_S, True

    def planned(self, step: int, now_s: float) -> None:
        self._planned_s[step] = now_s

    def settled(self, step: int, num_prompt_tokens: int, num_decodes: int, now_s: float) -> float:
        """Note a step's end. Returns its duration, from its plan or the end of the step before, whichever is later."""
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
        """Return the step times, at most `RENEWED_S` old."""
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
