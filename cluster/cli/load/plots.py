"""Plots as inline SVG: lines, histograms and points. Colours are the classes `s0` to `s5` of the page's style sheet.

data ──Scale──> positions in a frame of WIDTH x HEIGHT units, with ticks at round numbers
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 280  # about the width of a plot on a screen, so that text keeps its size
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 14, 52  # margins of the frame, with room for the larger text on a phone
TICKS = 6
MARGIN = 0.04  # by which a scale extends beyond its data, as a share of its length
NUM_COLORS = 6


@dataclass(frozen=True)
class Series:
    """Points of one run. `notes` are drawn beside the points, `hints` appear under the pointer."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int = 0
    notes: Sequence[str] = ()
    hints: Sequence[str] = ()
    is_dashed: bool = False


@dataclass(frozen=True)
class Scale:
    """Maps values between `low` and `high` to positions between 0 and 1."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def of(cls, values: Iterable[float], *, is_log: bool = False, from_zero: bool = False) -> Scale:
        """Return a scale of all values, with a margin. A logarithmic one leaves out values that are not positive."""
        shown = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)]
        if not shown:
            return cls(1.0, 10.0, is_log) if is_log else cls(0.0, 1.0)
        low, high = min(shown), max(shown)
        if is_log:
            margin = (high / low) ** MARGIN if high > low else 1.5
            return cls(low / margin, high * margin, True)
        low = min(low, 0.0) if from_zero else low
        span = (high - low) or abs(high) or 1.0
        return cls(low if from_zero else low - MARGIN * span, high + MARGIN * span)

    def place(self, value: float) -> float:
        if self.is_log:
            return math.log(max(value, self.low * 1e-3) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return round values on the scale."""
        if not self.is_log:
            return _round_values(self.low, self.high)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
            found = [step * 10.0**decade for decade in decades for step in steps]
            found = [value for value in found if self.low <= value <= self.high]
            if len(found) >= 3:
                return found if len(found) <= 2 * TICKS else found[:: math.ceil(len(found) / TICKS)]
        return _round_values(self.low, self.high)


def _round_values(low: float, high: float) -> list[float]:
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Write a number in few characters: 0.25, 3.1, 120, 12.5k."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size or (abs(value) >= size and size == 1e6):
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class Frame:
    """The axes of a plot."""

    title: str  # for screen readers
    x: Scale
    y: Scale
    x_label: str
    y_label: str

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of a point in the SVG's units."""
        across, up = self.x.place(x), min(max(self.y.place(y), -0.02), 1.02)
        return LEFT + across * (WIDTH - LEFT - RIGHT), TOP + (1 - up) * (HEIGHT - TOP - BOTTOM)

    def draw(self, marks: Iterable[str]) -> str:
        """Return the SVG of the axes with the given marks inside."""
        bottom = HEIGHT - BOTTOM
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title, quote=True)}">',
            *(self._across(value, bottom) for value in self.x.ticks()),
            *(self._up(value) for value in self.y.ticks()),
            f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>',
            f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
            f"{escape(self.x_label)}</text>",
            f'<text class="label" transform="translate(14 {(TOP + bottom) / 2:.0f}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_label)}</text>",
            *marks,
            "</svg>",
        ]
        return "\n".join(parts)

    def _across(self, value: float, bottom: int) -> str:
        x = self.at(value, self.y.low)[0]
        line = f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>'
        return f'{line}<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{number(value)}</text>'

    def _up(self, value: float) -> str:
        y = self.at(self.x.low, value)[1]
        line = f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        return f'{line}<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>'


def line(frame: Frame, series: Series) -> str:
    """Return a line through the points of a series."""
    points = " ".join("{:.1f},{:.1f}".format(*frame.at(x, y)) for x, y in zip(series.xs, series.ys, strict=True))
    dashed = " dashed" if series.is_dashed else ""
    return f'<polyline class="line s{series.color % NUM_COLORS}{dashed}" points="{points}"/>'


def dots(frame: Frame, series: Series, *, filled: Sequence[bool] = ()) -> str:
    """Return the points of a series, with their notes and hints. Points whose `filled` is False are hollow."""
    parts = []
    for index, (x, y) in enumerate(zip(series.xs, series.ys, strict=True)):
        across, down = frame.at(x, y)
        hollow = " hollow" if filled and not filled[index] else ""
        hint = f"<title>{escape(series.hints[index])}</title>" if series.hints else ""
        parts.append(
            f'<circle class="dot s{series.color % NUM_COLORS}{hollow}" cx="{across:.1f}" cy="{down:.1f}" r="4.5">'
            f"{hint}</circle>"
        )
        if series.notes:
            side, anchor = (-8, "end") if across > WIDTH - RIGHT - 50 else (8, "start")
            parts.append(
                f'<text class="note" x="{across + side:.1f}" y="{down - 7:.1f}" text-anchor="{anchor}">'
                f"{escape(series.notes[index])}</text>"
            )
    return "\n".join(parts)


def bars(frame: Frame, series: Series, edges: Sequence[float]) -> str:
    """Return the outline of a histogram whose bins lie between `edges`; `series.ys` are their heights."""
    base = frame.at(edges[0], 0)[1]
    path = [f"M{frame.at(edges[0], 0)[0]:.1f} {base:.1f}"]
    for index, height in enumerate(series.ys):
        left, top = frame.at(edges[index], height)
        path.append(f"L{left:.1f} {top:.1f}H{frame.at(edges[index + 1], height)[0]:.1f}")
    path.append(f"V{base:.1f}Z")
    return f'<path class="bars s{series.color % NUM_COLORS}" d="{"".join(path)}"/>'


def histogram(title: str, label: str, runs: Sequence[Series], *, num_bins: int = 36) -> str:
    """Return the distributions of `xs` on a logarithmic scale, one outline for each run. Heights are percentages."""
    scale = Scale.of([value for run in runs for value in run.xs], is_log=True)
    steps = [scale.low * (scale.high / scale.low) ** (index / num_bins) for index in range(num_bins + 1)]
    outlines = []
    for run in runs:
        counts = [0] * num_bins
        for value in run.xs:
            counts[min(max(int(scale.place(value) * num_bins), 0), num_bins - 1)] += 1
        shares = [100 * count / max(1, len(run.xs)) for count in counts]
        outlines.append(Series(run.name, steps[:-1], shares, run.color))
    heights = Scale.of([height for outline in outlines for height in outline.ys], from_zero=True)
    frame = Frame(title, scale, heights, label, "share, %")
    return frame.draw(bars(frame, outline, steps) for outline in outlines)


def cumulative(title: str, label: str, runs: Sequence[Series]) -> str:
    """Return cumulative distributions; `xs` are quantiles at even steps, in ascending order."""
    lines = [
        Series(run.name, run.xs, [100 * index / max(1, len(run.xs) - 1) for index in range(len(run.xs))], run.color)
        for run in runs
    ]
    scale = Scale.of([value for run in runs for value in run.xs], is_log=True)
    frame = Frame(title, scale, Scale(0, 103), label, "requests or tokens up to it, %")
    return frame.draw(line(frame, each) for each in lines)


def over_time(title: str, label: str, runs: Sequence[Series]) -> str:
    """Return a plot of `ys` over time; `xs` are seconds."""
    x = Scale.of([value for run in runs for value in run.xs], from_zero=True)
    y = Scale.of([value for run in runs for value in run.ys], from_zero=True)
    frame = Frame(title, x, y, "seconds", label)
    return frame.draw(line(frame, run) for run in runs)


def points(title: str, labels: tuple[str, str], runs: Sequence[Series], *, is_log: bool = False) -> str:
    """Return points joined by lines, in the given order; the y axis starts at 0. `is_log` is about the x axis."""
    x = Scale.of([value for run in runs for value in run.xs], is_log=is_log, from_zero=not is_log)
    y = Scale.of([value for run in runs for value in run.ys], from_zero=True)
    frame = Frame(title, x, y, *labels)
    return frame.draw([*(line(frame, run) for run in runs), *(dots(frame, run) for run in runs)])


def pareto(title: str, labels: tuple[str, str], runs: Sequence[Series]) -> str:
    """Return points of which both values should be high, and a line through the Pareto front."""
    x = Scale.of([value for run in runs for value in run.xs], from_zero=True)
    y = Scale.of([value for run in runs for value in run.ys], from_zero=True)
    frame = Frame(title, x, y, *labels)
    marks: list[str] = []
    for run in runs:
        best = front(run.xs, run.ys)
        order = sorted((index for index, is_best in enumerate(best) if is_best), key=lambda index: run.xs[index])
        marks.append(line(frame, Series(run.name, [run.xs[i] for i in order], [run.ys[i] for i in order], run.color)))
        marks.append(dots(frame, run, filled=best))
    return frame.draw(marks)


def front(xs: Sequence[float], ys: Sequence[float]) -> list[bool]:
    """Return for each point whether no other is at least as good in both values and better in one (Pareto front)."""
    pairs = list(zip(xs, ys, strict=True))
    return [not any(a >= x and b >= y and (a, b) != (x, y) for a, b in pairs) for x, y in pairs]
