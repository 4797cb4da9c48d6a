"""The report of `baton bench serve`: one HTML file with plots, which loads no other file and runs no script.

results (one or more runs, or sweeps) ──> tables and SVG ──report.html──> page
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from . import plots
from .figures import PLOTS
from .plots import Series, number

PAGE = Path(__file__).with_name("report.html")
FACTS = (  # about a run: name, key
    ("model", "model_id"),
    ("data set", "dataset_name"),
    ("requests a second", "request_rate"),
    ("in flight at most", "max_concurrency"),
    ("seconds", "duration"),
)
FIGURES = (  # name, key, unit, whether more is better
    ("requests", "completed", "", None),
    ("failed", "failed", "", False),
    ("requests/s", "request_throughput", "", True),
    ("requests/s within the goals", "request_goodput", "", True),
    ("output tokens/s", "output_throughput", "", True),
    ("all tokens/s", "total_token_throughput", "", True),
    ("first token, median", "median_ttft_ms", "ms", False),
    ("first token, p99", "p99_ttft_ms", "ms", False),
    ("between tokens, median", "median_itl_ms", "ms", False),
    ("between tokens, p99", "p99_itl_ms", "ms", False),
    ("a token, median", "median_tpot_ms", "ms", False),
    ("whole answer, median", "median_e2el_ms", "ms", False),
    ("drafts accepted", "spec_decode_acceptance_rate", "%", True),
)
SAME = 0.02  # a relative difference between two runs below this is not coloured


class NoResult(ValueError):
    """A file that is not a result of `baton bench serve`."""


@dataclass(frozen=True)
class Run:
    """One run: of a single measurement, or of a sweep."""

    name: str
    color: int
    figures: dict[str, Any]

    def points(self, key: str) -> list[float]:
        found: list[float] = self.figures[PLOTS][key]
        return found

    @property
    def times(self) -> list[float]:
        """The middle of each time bucket, in seconds."""
        bucket_s = self.figures[PLOTS]["bucket_s"]
        return [(index + 0.5) * bucket_s for index in range(len(self.points("output_tokens_per_s")))]


@dataclass(frozen=True)
class Result:
    """The result of one command: one run, or the runs of a sweep. When results are compared, each has one colour."""

    name: str
    runs: list[Run]
    sweep: str | None  # the figure that changes from run to run


def read_results(file: Path) -> list[dict[str, Any]]:
    """Read a file that `baton bench serve` wrote: one result, or one a line. Raises `NoResult`."""
    try:
        text = file.read_text()
        results = _of_lines(text) or [json.loads(text)]
        for run in (run for result in results for run in result.get("runs", [result])):
            if PLOTS not in run or "output_throughput" not in run:
                raise ValueError("it has no points of plots: write it with this version")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise NoResult(f"{file} is not a result of `baton bench serve`: {error}") from None
    names = [file.stem] if len(results) == 1 else [f"{file.stem} {number + 1}" for number in range(len(results))]
    return [{**result, "label": result.get("label") or name} for result, name in zip(results, names, strict=True)]


def _of_lines(text: str) -> list[dict[str, Any]]:
    """Return the results of a text that has one a line; empty if the text has another format."""
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        return []


def report(measured: Sequence[dict[str, Any]]) -> str:
    """Return the HTML page of one result, or of several side by side, each with a `label`."""
    results = [_result(each, index, len(measured)) for index, each in enumerate(measured)]
    runs = [run for result in results for run in result.runs]
    names = [(run.name, run.color) for run in runs] if len(results) == 1 else _names(results)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(PAGE.read_text()).render(
        title=" and ".join(result.name for result in results),
        facts=[(name, _shared(runs, key)) for name, key in FACTS],
        runs=runs,
        rows=_rows(runs),
        is_compared=len(runs) == 2,
        sections=[*_sweeps(results), *_distributions(runs, names), *_over_time(runs, names)],
        errors=[(run.name, error) for run in runs for error in run.figures["errors"]],
    )


def _names(results: Sequence[Result]) -> list[tuple[str, int]]:
    return [(result.name, result.runs[0].color) for result in results]


def _result(measured: dict[str, Any], index: int, num_results: int) -> Result:
    name, sweep = measured.get("label") or f"run {index + 1}", measured.get("sweep")
    if sweep is None:
        return Result(name, [Run(name, index, measured)], None)
    runs = []
    for at, figures in enumerate(measured["runs"]):
        level = f"{figures[sweep]} {'in flight' if sweep == 'max_concurrency' else 'requests/s'}"
        label = level if num_results == 1 else f"{name}, {level}"
        runs.append(Run(label, at if num_results == 1 else index, figures))
    return Result(name, runs, sweep)


def _shared(runs: Sequence[Run], key: str) -> str:
    values = list(dict.fromkeys(_text(run.figures.get(key)) for run in runs))
    return ", ".join(values)


def _text(value: Any) -> str:
    if value is None:
        return "any"
    return number(value) if isinstance(value, int | float) else str(value)


@dataclass(frozen=True)
class Row:
    """A figure of all runs. `change` compares the second run with the first, in percent; `meaning` rates it."""

    name: str
    unit: str
    cells: list[str]
    change: str
    meaning: str  # "better", "worse" or "same"


def _rows(runs: Sequence[Run]) -> list[Row]:
    rows = []
    for name, key, unit, more_is_better in FIGURES:
        values = [run.figures.get(key) for run in runs]
        if all(value is None for value in values):
            continue
        change, meaning = "", "same"
        if len(values) == 2 and more_is_better is not None and all(values):
            first, second = map(float, values)  # type: ignore[arg-type]
            change = f"{100 * (second / first - 1):+.1f} %"
            if abs(second / first - 1) > SAME:
                meaning = "better" if (second > first) == more_is_better else "worse"
        rows.append(Row(name, unit, [_text(value) if value is not None else "" for value in values], change, meaning))
    return rows


@dataclass(frozen=True)
class Section:
    title: str
    about: str
    names: list[tuple[str, int]]  # of the runs, with their colours
    figures: list[tuple[str, str]]  # caption and SVG


def _distributions(runs: Sequence[Run], names: list[tuple[str, int]]) -> list[Section]:
    sections = []
    for title, key, about in (
        ("Time to the first token", "ttft_ms", "From the request to the first event with a token."),
        ("Time between tokens", "itl_ms", "Between one event with tokens and the next of the same answer."),
    ):
        shown = [Series(run.name, run.points(key), [], run.color) for run in runs if run.points(key)]
        if not shown:
            continue
        drawn = [
            ("How often each time occurred", plots.histogram(f"{title}: histogram", "milliseconds", shown)),
            ("Share up to each time", plots.cumulative(f"{title}: cumulative", "milliseconds", shown)),
        ]
        sections.append(Section(title, about, names, drawn))
    return sections


def _over_time(runs: Sequence[Run], names: list[tuple[str, int]]) -> list[Section]:
    drawn = []
    for caption, key, label in (
        ("Output tokens a second", "output_tokens_per_s", "tokens/s"),
        ("Requests in flight", "requests_in_flight", "requests"),
        ("Requests sent a second", "requests_per_s", "requests/s"),
    ):
        lines = [Series(run.name, run.times, run.points(key), run.color) for run in runs]
        drawn.append((caption, plots.over_time(f"{caption} over time", label, lines)))
    return [Section("Over time", "Means over buckets of time, from the first request on.", names, drawn)]


def _sweeps(results: Sequence[Result]) -> list[Section]:
    """Return a section for each figure that the results sweep over."""
    figures = dict.fromkeys(result.sweep for result in results if result.sweep is not None)
    return [_sweep(figure, [result for result in results if result.sweep == figure]) for figure in figures]


def _sweep(sweep: str, results: Sequence[Result]) -> Section:
    fronts, firsts, betweens, rates = [], [], [], []
    for result in results:
        color = result.runs[0].color
        runs = [run.figures for run in result.runs if run.figures["completed"]]
        levels = [_level(run[sweep]) for run in runs]
        # Speed by a user's tpot: the gaps between events (itl) are near 0 if several events arrive at once.
        users = [1000 / run["median_tpot_ms"] if run["median_tpot_ms"] else 0.0 for run in runs]
        tokens = [run["output_throughput"] for run in runs]
        hints = [
            f"{_text(run[sweep])}: {number(total)} tokens/s in all, {number(one)} for one"
            for run, total, one in zip(runs, tokens, users, strict=True)
        ]
        fronts.append(Series(result.name, users, tokens, color, [_text(run[sweep]) for run in runs], hints))
        ends = [level for level in levels if math.isfinite(level)]
        places = [level if math.isfinite(level) else 2 * max(ends, default=1.0) for level in levels]
        rates.append(Series(result.name, places, tokens, color))
        for median, key in ((True, "median"), (False, "p99")):
            name = f"{result.name}, {'median' if median else 'p99'}"
            firsts.append(Series(name, places, _column(runs, f"{key}_ttft_ms"), color, is_dashed=not median))
            betweens.append(Series(name, places, _column(runs, f"{key}_itl_ms"), color, is_dashed=not median))
    level = "requests in flight at most" if sweep == "max_concurrency" else "requests a second"
    front = plots.pareto(
        "Pareto front of the sweep", ("output tokens/s of one answer (median)", "output tokens/s of all"), fronts
    )
    drawn = [
        (f"Speed of one answer and of all; numbers are {level}; a line joins the best, the rest are hollow", front),
        ("Output tokens a second", plots.points("Throughput by load", (level, "tokens/s"), rates, is_log=True)),
        ("First token: median, and p99 dashed", plots.points("First token", (level, "ms"), firsts, is_log=True)),
        (
            "Between tokens: median, and p99 dashed",
            plots.points("Between tokens", (level, "ms"), betweens, is_log=True),
        ),
    ]
    about = "Each point is one run." + (" A rate of inf is drawn at twice the highest." if "rate" in sweep else "")
    return Section("The sweep", about, _names(results), drawn)


def _level(value: Any) -> float:
    return math.inf if value in (None, "inf") else float(value)


def _column(runs: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [run.get(key, 0.0) for run in runs]
