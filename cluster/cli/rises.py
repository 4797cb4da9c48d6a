"""Prometheus' text format, and what its counters rose by in the last seconds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]


@dataclass(frozen=True)
class MetricSample:
    name: str
    labels: Labels
    value: float

    @property
    def key(self) -> tuple[str, frozenset[tuple[str, str]]]:
        return self.name, frozenset(self.labels.items())


def samples_of(text: str) -> list[MetricSample]:
    """Return the samples of an answer of `/metrics`. Raises `ValueError` for what is none."""
    families = text_string_to_metric_families(text)
    return [MetricSample(each.name, each.labels, each.value) for family in families for each in family.samples]


def gauge(samples: Iterable[MetricSample], name: str, label: str, value: str) -> float | None:
    """Return the sum of a gauge over series with this label; None if there is none."""
    found = [each.value for each in samples if each.name == name and each.labels.get(label) == value]
    return sum(found) if found else None


class Rises:
    """Keeps what counters rose by between polls, as long ago as `keep_s`."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._newest: dict[object, float] = {}
        # When, seconds since the one before, and the rises of each poll.
        self._polls: deque[tuple[float, float, list[MetricSample]]] = deque()
        self._at_s: float | None = None

    def add(self, at_s: float, samples: Iterable[MetricSample]) -> None:
        """Take the counters of a poll. What they held at the first one is not a rise."""
        rises = []
        for each in samples:
            before = self._newest.get(each.key, 0.0)
            # A counter that fell is that of a new process, which began at 0.
            by = each.value if each.value < before else each.value - before
            self._newest[each.key] = each.value
            if by > 0 or each.name.endswith("_bucket"):  # buckets that did not rise are bounds, too
                rises.append(MetricSample(each.name, each.labels, by))
        if self._at_s is not None:
            self._polls.append((at_s, at_s - self._at_s, rises))
        while self._polls and at_s - self._polls[0][0] >= self._keep_s:
            self._polls.popleft()
        self._at_s = at_s

    @property
    def covered_s(self) -> float:
        """The seconds that the polls cover: 0 before the second poll."""
        return sum(took_s for _, took_s, _ in self._polls)

    def sum(self, name: str, fits: Callable[[Labels], bool] = lambda labels: True) -> float:
        """Return by how much a counter rose in all its series whose labels fit."""
        return sum(
            each.value for _, _, rises in self._polls for each in rises if each.name == name and fits(each.labels)
        )

    def rate(self, name: str, fits: Callable[[Labels], bool] = lambda labels: True) -> float | None:
        """Return its rise in a second; None before the second poll."""
        return self.sum(name, fits) / self.covered_s if self.covered_s else None

    def by(self, name: str, key: Callable[[Labels], str]) -> dict[str, float]:
        """Return by how much it rose for each text that `key` makes of the labels."""
        sums: dict[str, float] = {}
        for _, _, rises in self._polls:
            for each in rises:
                if each.name == name:
                    sums[key(each.labels)] = sums.get(key(each.labels), 0.0) + each.value
        return sums

    def quantile(self, name: str, share: float) -> float | None:
        """Return a quantile of a histogram; None if nothing was observed."""
        counts = self.by(f"{name}_bucket", lambda labels: labels["le"])
        return bucket_quantile({float(bound): count for bound, count in counts.items()}, share)


def bucket_quantile(counts: Mapping[float, float], share: float) -> float | None:
    """Return a quantile from cumulative counts by upper bound, as PromQL's `histogram_quantile`; None without any."""
    bounds = sorted(counts.items())
    total = bounds[-1][1] if bounds else 0.0
    if total <= 0:
        return None
    lower = below = 0.0
    for upper, up_to in bounds:
        if up_to >= share * total and up_to > below:
            return lower if math.isinf(upper) else lower + (upper - lower) * (share * total - below) / (up_to - below)
        lower, below = upper, up_to
    return lower
