"""`baton top`: the fleet in a terminal, redrawn every few seconds.

GET /v1/cluster/ranks, /metrics, /health ──> FleetView (newest answers, increases in the last minute) ──> tables

`/metrics` is in Prometheus' text format. `Rises` keeps by how much its counters rose between polls.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .cli_common import Pace, WidestThatFits, fail, watch
from .http_client import RankList, decoded, gateway_client, known, reason

MINUTE_S = 60.0
NOW_S = 10.0  # time over which rates are averaged
BAR = 10  # characters
FAMILIES = (
    *("baton_time_to_first_token_seconds", "baton_inter_token_latency_seconds", "baton_http_responses_total"),
    *("baton_stream_errors_total", "baton_request_retries_total", "baton_kv_receives_total", "baton_kv_leases_held"),
    *("baton_kv_transfer_bytes_total", "baton_process_up"),
)
COUNTERS = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
OVERLOAD = ("408", "429")
LEVELS = {"good": "green", "warn": "yellow", "bad": "red", "wait": "cyan"}
Labels = Mapping[str, str]


def show_top(url: str, api_key: str | None, pace: Pace) -> None:
    """Draw the fleet until Ctrl-C, or as often as `pace` says. End the command if no gateway answers at first."""
    with gateway_client(url, api_key) as client:
        fleet, is_first = FleetView(client), True
        try:
            fleet.update()
        except httpx.HTTPError as error:
            fail(reason(url, error), code=1)

        def draw() -> RenderableType:
            nonlocal is_first
            error_text = ""
            try:
                if not is_first:
                    fleet.update()
            except httpx.HTTPError as error:
                error_text = reason(url, error)
            is_first = False
            return Group(*fleet.parts(error_text))

        watch(pace, draw)


class FleetView:
    """The newest answers of a server, and the increases of its counters."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._minute, self._lately = Rises(MINUTE_S), Rises(NOW_S)  # of /metrics
        self._engines = Rises(NOW_S)  # of the engines' statistics in /v1/cluster/ranks
        self._hits = Rises(MINUTE_S)  # the same over a minute, for prefix hits
        self._samples: list[MetricSample] = []
        self._metrics_error = ""
        self._is_ready = False
        self._ranks = RankList("list", "", [], [], [])

    def update(self) -> None:
        """Ask the gateway. Raises `httpx.HTTPError`; if only `/metrics` cannot be read, its figures are left out."""
        at_s = time.monotonic()
        self._is_ready = self._client.get("/health").status_code == httpx.codes.OK
        self._ranks = decoded(self._client.get("/v1/cluster/ranks"), RankList)
        counted = [
            MetricSample(name, {"engine": rank["engine_id"], "epoch": rank["epoch"]}, rank["stats"][name])
            for rank in self._ranks.data
            if rank["stats"]
            for name in COUNTERS
        ]
        for rises in (self._engines, self._hits):
            rises.add(at_s, counted)
        answer = self._client.get("/metrics", params={"name[]": FAMILIES}, headers={"cache-control": "max-age=1"})
        try:
            self._samples = samples_of(answer.raise_for_status().text)
            self._metrics_error = ""
        except (httpx.HTTPStatusError, ValueError) as error:  # a balancer may hide /metrics from clients
            self._samples, self._metrics_error = [], f"/metrics cannot be read: {error}"
        for rises in (self._minute, self._lately):
            rises.add(at_s, self._samples)

    def parts(self, error: str = "") -> Iterator[RenderableType]:
        """Yield the parts of the display from top to bottom; `error` comes first, above the last known state."""
        yield self._verdict(error)
        yield self._figures()
        yield WidestThatFits(self._engine_table(), self._engine_table(is_narrow=True))
        lanes = [(rank, lane) for rank in self._ranks.data for lane in rank["reads_from"]]
        if lanes:
            yield self._lane_table(lanes)
        for line, level in self._problems():
            yield Text(line, style=LEVELS[level])
        if failures := self._failures():
            yield self._failure_table(failures)

    def _verdict(self, error: str) -> Text:
        engines, gateways = len(self._ranks.data), len(self._ranks.gateways)
        running, waiting = sum(rank["num_running"] or 0 for rank in self._ranks.data), self._all("num_requests_waiting")
        level, title = ("good", "Serving") if self._is_ready else ("bad", "Not serving: no engine can take a request")
        if error:
            level, title = "bad", error
        text = Text(title, style=f"bold {LEVELS[level]}")
        counts = f"   engines {engines}   gateways {gateways}   running {running}   waiting {waiting}   "
        return text.append(counts + time.strftime("%H:%M:%S"), style="default not bold")

    def _all(self, field: str) -> int:
        return sum((rank["stats"] or {}).get(field, 0) for rank in self._ranks.data)

    def _figures(self) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
        looked, hit = self._hits.sum("prefix_cache_queries"), self._hits.sum("prefix_cache_hits")
        read, written = self._engines.rate("prompt_tokens"), self._engines.rate("generation_tokens")
        handed = self._lately.rate("baton_kv_receives_total", lambda labels: labels.get("outcome") == "received")
        moved = self._lately.rate("baton_kv_transfer_bytes_total")
        table.add_row(
            f"first token {self._latency('baton_time_to_first_token_seconds')}",
            f"written {_scaled(written)} tok/s",
            f"prefix hits {_percent(hit / looked if looked else None)}",
        )
        table.add_row(
            f"between tokens {self._latency('baton_inter_token_latency_seconds')}",
            f"read {_scaled(read)} tok/s",
            f"hand-offs {_scaled(handed)}/s, {_scaled(moved)}B/s",
        )
        return table

    def _latency(self, name: str) -> str:
        half, most = self._minute.quantile(name, 0.5), self._minute.quantile(name, 0.99)
        return "–" if half is None or most is None else f"p50 {1e3 * half:.1f} ms, p99 {1e3 * most:.1f} ms"

    def _engine_table(self, *, is_narrow: bool = False) -> Table:
        """Return the table of engines; a narrow one fits in a terminal of 80 characters."""
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        last = ("read/s", "written/s") if is_narrow else ("read tok/s", "written tok/s", "leases")
        for column in ("rank", "role", "engine", "state", "run", "wait", "KV", *last):
            left = column in ("role", "engine", "state", "KV")
            table.add_column(column, justify="left" if left else "right", no_wrap=True)
        for rank in self._ranks.data:
            stats, engine = rank["stats"] or {}, rank["engine_id"]
            level, state = _state(rank)
            leases = gauge(self._samples, "baton_kv_leases_held", "engine", engine)
            waiting = stats.get("num_requests_waiting", 0) + stats.get("num_requests_waiting_for_kv", 0)
            of_engine = _is(engine=engine)
            table.add_row(
                *(str(rank["rank"]), rank["role"], engine, Text(state, style=LEVELS[level])),
                *(known(rank["num_running"]), str(waiting) if stats else "?"),
                _percent(stats.get("kv_usage")) if is_narrow else _bar(stats.get("kv_usage")),
                *(_scaled(self._engines.rate(name, of_engine)) for name in COUNTERS[:2]),
                *([] if is_narrow else ["–" if leases is None else f"{leases:.0f}"]),
            )
        return table

    def _lane_table(self, lanes: list[tuple[dict[str, Any], dict[str, Any]]]) -> Table:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for column in ("reader", "reads from", "over", "GB/s", "reads"):
            table.add_column(column, justify="right" if column in ("GB/s", "reads") else "left", no_wrap=True)
        for rank, lane in lanes:
            rate = "?" if lane["bytes_per_s"] is None else f"{lane['bytes_per_s'] / 1e9:.1f}"
            shown = Text(f"{rate}: TCP?", style="red") if lane["is_slow"] else Text(rate)
            table.add_row(rank["engine_id"], lane["engine_id"], lane["transport"], shown, f"{lane['num_reads']:,}")
        return table

    def _problems(self) -> Iterator[tuple[str, str]]:
        for group in self._ranks.starting:
            yield f"{group['group_id']} starts on {group['node_ip']}: {group['state']}", "wait"
        for each in self._samples:
            if each.name == "baton_process_up" and not each.value:
                name = f"{each.labels.get('kind')} {each.labels.get('process')}"
                yield f"The {name} does not answer: its figures are missing.", "bad"
        if self._metrics_error:
            yield f"{self._metrics_error}: latencies, hand-offs and failures are not shown.", "warn"

    def _failures(self) -> list[tuple[str, float]]:
        """Return the failures of the last minute by reason, the most frequent first."""
        found: dict[str, float] = {}
        answers = self._minute.by("baton_http_responses_total", _failed_answer)
        found |= {f"answers {status}": count for status, count in answers.items() if status}
        broken = self._minute.by("baton_stream_errors_total", lambda labels: labels.get("status", ""))
        found |= {f"streams that broke, {status}": count for status, count in broken.items()}
        retried = self._minute.by("baton_request_retries_total", lambda labels: labels.get("reason", ""))
        found |= {f"attempts repeated, {why}": count for why, count in retried.items()}
        lost = self._minute.by("baton_kv_receives_total", lambda labels: labels.get("outcome", ""))
        found |= {f"hand-offs {outcome}": count for outcome, count in lost.items() if outcome != "received"}
        return sorted(((why, count) for why, count in found.items() if count), key=lambda each: -each[1])

    def _failure_table(self, failures: list[tuple[str, float]]) -> Table:
        table = Table(title="Last minute", title_justify="left", box=None, show_header=False, pad_edge=False)
        for why, count in failures:
            table.add_row(f"{count:.0f}", why)
        return table


def _failed_answer(labels: Labels) -> str:
    status, route = labels.get("status", ""), labels.get("route", "")
    return f"{status} of {route}" if route in GENERATING and (status >= "500" or status in OVERLOAD) else ""


def _is(**wanted: str) -> Any:
    return lambda labels: all(labels.get(name) == value for name, value in wanted.items())


def _state(rank: dict[str, Any]) -> tuple[str, str]:
    """Return an engine's state as a level (for the colour) and a word."""
    if rank["draining"]:
        return "wait", "drains"
    if not rank["reachable"]:
        return "bad", "not reached"
    if rank["circuit"] != "closed":
        return "bad", f"circuit {rank['circuit']}"
    return ("good", "ready") if rank["stats"] else ("wait", "no news yet")


def _bar(share: float | None) -> Text:
    if share is None:
        return Text("?")
    full = round(share * BAR)
    level = "bad" if share > 0.95 else "warn" if share > 0.8 else "good"
    return Text("█" * full, style=LEVELS[level]).append("·" * (BAR - full) + f" {_percent(share)}", style="default")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _scaled(value: float | None) -> str:
    """Return a number with three significant digits as text: 840, 15.2k, 1.5G."""
    if value is None:
        return "–"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


@dataclass(frozen=True)
class MetricSample:
    name: str
    labels: Labels
    value: float

    @property
    def key(self) -> tuple[str, frozenset[tuple[str, str]]]:
        return self.name, frozenset(self.labels.items())


def samples_of(text: str) -> list[MetricSample]:
    """Parse an answer of `/metrics`. Raises `ValueError` if it is none."""
    families = text_string_to_metric_families(text)
    return [MetricSample(each.name, each.labels, each.value) for family in families for each in family.samples]


def gauge(samples: Iterable[MetricSample], name: str, label: str, value: str) -> float | None:
    """Return the sum of a gauge over series with this label; None if there is none."""
    found = [each.value for each in samples if each.name == name and each.labels.get(label) == value]
    return sum(found) if found else None


class Rises:
    """The increases of counters between polls, kept for `keep_s` seconds."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._newest: dict[object, float] = {}
        # For each poll: its time, the seconds since the poll before, and the increases in between.
        self._polls: deque[tuple[float, float, list[MetricSample]]] = deque()
        self._at_s: float | None = None

    def add(self, at_s: float, samples: Iterable[MetricSample]) -> None:
        """Add the counters of a poll. The first poll only sets the values to count from."""
        rises = []
        for each in samples:
            before = self._newest.get(each.key, 0.0)
            # A counter that fell belongs to a new process, which started at 0.
            by = each.value if each.value < before else each.value - before
            self._newest[each.key] = each.value
            if by > 0 or each.name.endswith("_bucket"):  # an unchanged bucket still gives a bound of its histogram
                rises.append(MetricSample(each.name, each.labels, by))
        if self._at_s is not None:
            self._polls.append((at_s, at_s - self._at_s, rises))
        while self._polls and at_s - self._polls[0][0] >= self._keep_s:
            self._polls.popleft()
        self._at_s = at_s

    @property
    def covered_s(self) -> float:
        """The seconds that the kept polls cover: 0 before the second poll."""
        return sum(took_s for _, took_s, _ in self._polls)

    def sum(self, name: str, fits: Callable[[Labels], bool] = lambda labels: True) -> float:
        """Return by how much a counter rose, summed over the series whose labels fit."""
        return sum(
            each.value for _, _, rises in self._polls for each in rises if each.name == name and fits(each.labels)
        )

    def rate(self, name: str, fits: Callable[[Labels], bool] = lambda labels: True) -> float | None:
        """Return the increase a second; None before the second poll."""
        return self.sum(name, fits) / self.covered_s if self.covered_s else None

    def by(self, name: str, key: Callable[[Labels], str]) -> dict[str, float]:
        """Return the increase by group, where `key` makes the group's name from a series' labels."""
        sums: dict[str, float] = {}
        for _, _, rises in self._polls:
            for each in rises:
                if each.name == name:
                    sums[key(each.labels)] = sums.get(key(each.labels), 0.0) + each.value
        return sums

    def quantile(self, name: str, share: float) -> float | None:
        """Return a quantile of a histogram; None if it counted nothing."""
        counts = self.by(f"{name}_bucket", lambda labels: labels["le"])
        return bucket_quantile({float(bound): count for bound, count in counts.items()}, share)


def bucket_quantile(counts: Mapping[float, float], share: float) -> float | None:
    """Compute a quantile from cumulative counts by upper bound, like PromQL's `histogram_quantile`; None if empty."""
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
