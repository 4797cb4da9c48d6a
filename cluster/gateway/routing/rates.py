"""The rates in the cost formula (`cost.py`), which engines measure and report with their status.

Before the first report, the settings give them.

    prefill of a prompt    line by its tokens, for each engine (`StepTimes.prefill`)
    one more request       time by which it lengthens an engine's steps (`StepTimes.decode`)
    a read of blocks       line by their number, for each pair of engines (`PeerLane.read_s`)

Since engines measure, all gateways know the same figures, and a new gateway knows them from the first messages. For an
engine that has measured nothing yet, the median of the others is taken. So it is for an engine whose figure is within
a factor `ALIKE` of the median: the measurements of equal engines differ a little, and chance must not send all requests
to one of them.

A measurement is stale `STALE_S` after its report. Machines share no clock, so engines report how many measurements they
have made, and a gateway notes on its own clock when that number has grown.

    a pair of engines    If stale, the figure of other pairs of the same two nodes that were measured since is used;
                         even earlier if all of these have become much slower.
    a slow engine        It keeps its figure, and gets single requests as trials (`router.py`): other engines' figures
                         do not show whether it has recovered, and if it has not, it must not get its full share.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

from baton.cluster.contracts import EngineRecord, EngineView
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.pace import SETTLED, STALE_S, Line, StepTimes
from baton.engine.strict_model import LONGEST_S, MOST_REQUESTS, MOST_TOKENS, StrictModel
from baton.kv_transfer.protocol.messages import EngineKey
from baton.kv_transfer.protocol.stats import PeerLane, TransferStats

ALIKE = 1.5  # ratio of two figures up to which they count as equal
NEWEST = 5  # measurements of pairs of the same two nodes whose median is used
SLOWED_DOWN = 3.0  # ratio of all newer measurements between two nodes to a pair's own, at which they replace it
RENEWED_S = 1.0  # between two updates of the medians
TYPICAL_TOKENS = 1024  # length of a prompt for which lines are compared


TokenRate = Annotated[float, Field(ge=1e-3, le=1e12)]  # tokens per second


class CostRates(StrictModel):
    """Settings of the cost formula. Defaults: an 8B model on H200s, NVLink within a node, 400 Gbit/s between nodes.

    Rates are guesses, used until engines have measured theirs.
    """

    prefill_tokens_per_s: TokenRate = 20_000.0  # of one engine; a guess
    # By which one more request delays the answers of an engine; a guess.
    decode_request_s: float = Field(0.01, ge=0, le=LONGEST_S)
    # Length of an answer for which that delay is computed, once it is measured.
    answer_tokens: int = Field(256, ge=0, le=MOST_TOKENS)
    # Cost in seconds of one second in which a running answer gets no token.
    stall_weight: float = Field(1.0, ge=0, le=MOST_REQUESTS)
    # Until a prefill engine full of held blocks has free ones again.
    block_release_s: float = Field(1.0, ge=0, le=LONGEST_S)
    handoff_s: float = Field(0.003, ge=0, le=LONGEST_S)  # of a hand-off, without its read
    # Hand-offs that take no longer are made without comparing costs.
    slow_handoff_s: float = Field(0.02, ge=0, le=LONGEST_S)
    node_tokens_per_s: TokenRate = 1_000_000.0  # whose KV is read between engines of one node; a guess
    network_tokens_per_s: TokenRate = 250_000.0  # the same between nodes; a guess


Nodes = tuple[str, str]  # of the engine that is read from, and of the reader


class _Measured(NamedTuple):
    at_s: float  # time of the report, on this gateway's clock
    read_s: Line  # time of a read by its tokens


class _Lanes:
    """The connections through which one engine reads from others."""

    def __init__(self) -> None:
        self.reported: TransferStats | None = None
        self.by_peer: dict[str, PeerLane] = {}
        self.measured: dict[str, _Measured] = {}  # by peer: its newest measurement, or what was known at pairing

    def update(self, report: TransferStats, now_s: float) -> list[tuple[str, _Measured]]:
        """Apply a report of the reader. Return the peers of which it has new measurements, with these."""
        self.reported, old = report, self.by_peer
        self.by_peer = {lane.engine_id: lane for lane in report.lanes}
        self.measured = {peer: known for peer, known in self.measured.items() if peer in self.by_peer}
        new = []
        for peer, lane in self.by_peer.items():
            before = old.get(peer)  # perhaps of a process that had the same name, and as many reads
            is_new = before is None or (before.num_reads, before.read_s) != (lane.num_reads, lane.read_s)
            if lane.read_s is not None and is_new:
                by_tokens = Line(lane.read_s.base_s, lane.read_s.unit_s / BLOCK_SIZE)
                self.measured[peer] = _Measured(now_s, by_tokens)
                if lane.num_reads:
                    new.append((peer, self.measured[peer]))
        return new


@dataclass(slots=True)
class _Freshness:
    """The age of an engine's measurements of one kind, on this gateway's clock.

    Measurements within `STALE_S` after the first of them form a series. From the `SETTLED`th of a series on, each one
    makes the figure fresh. A shorter series makes it fresh as of its beginning, once it is over.
    """

    num_measured: int
    fresh_s: float
    series_s: float = -math.inf  # beginning of the newest series
    num_before: int = 0

    def update(self, num_measured: int, now_s: float) -> None:
        if num_measured == self.num_measured:
            return
        if now_s - self.series_s > STALE_S:
            self.fresh_s = max(self.fresh_s, self.series_s)
            self.series_s, self.num_before = now_s, self.num_measured
        self.num_measured = num_measured
        if num_measured - self.num_before >= SETTLED:
            self.fresh_s = now_s

    def stale_s(self, now_s: float) -> float:
        """Return the age, or 0 while it is at most `STALE_S`."""
        is_series_over = now_s - self.series_s > STALE_S
        age_s = now_s - (max(self.fresh_s, self.series_s) if is_series_over else self.fresh_s)
        return age_s if age_s > STALE_S else 0.0


class _StepReports:
    """The newest report of an engine about its steps, and the freshness of its measurements."""

    def __init__(self, times: StepTimes, now_s: float) -> None:
        self.times, self.seen_s = times, now_s
        self.prefill = _Freshness(times.num_prefills, now_s)
        self.decode = _Freshness(times.num_decodes, now_s)

    def update(self, times: StepTimes, now_s: float) -> None:
        self.times = times
        self.prefill.update(times.num_prefills, now_s)
        self.decode.update(times.num_decodes, now_s)


class LearntRates:
    """The rates that one gateway has learnt from the engines' reports."""

    def __init__(self, guesses: CostRates, clock: Callable[[], float]) -> None:
        self.guesses = guesses
        self._clock = clock
        self._renewed_s, self._is_measured = -RENEWED_S, False
        self._lanes: dict[EngineKey, _Lanes] = {}
        self._steps: dict[EngineKey, _StepReports] = {}
        self.stale: frozenset[EngineKey] = frozenset()  # slow engines whose figures are stale, as of the last `renew`
        self._nodes: dict[str, str] = {}  # by engine
        self._between: defaultdict[Nodes, deque[_Measured]] = defaultdict(lambda: deque(maxlen=NEWEST))
        self._prefill = Line(0.0, 1 / guesses.prefill_tokens_per_s)  # the engines' median
        self._request_s = guesses.decode_request_s
        self._step_s = 0.0  # of the fastest engine; 0: unknown

    def reconfigure(self, guesses: CostRates) -> None:
        """Use other settings from the next choice on. Measurements still take precedence over guesses."""
        self.guesses = guesses
        if not self._is_measured:
            self._prefill = Line(0.0, 1 / guesses.prefill_tokens_per_s)
        self._request_s = guesses.decode_request_s
        self._renewed_s = -RENEWED_S

    @property
    def known(self) -> set[str]:
        """The ids of the engines about which something is stored."""
        return {key.engine_id for key in [*self._steps, *self._lanes]} | self._nodes.keys()

    def renew(self, engines: Sequence[EngineView]) -> None:
        """Apply the engines' reports: once a second, but in every call until one engine has measured something."""
        now_s = self._clock()
        if self._is_measured and now_s - self._renewed_s < RENEWED_S:
            return
        self._renewed_s = now_s
        for view in engines:
            self._reports_of(view).seen_s = now_s
            self._nodes[view.record.engine_id] = view.record.node_id
        self._forget_old(now_s)
        times = [reports.times for reports in self._steps.values()]
        prefills = [each.prefill for each in times if each.prefill is not None]
        self._is_measured = bool(prefills)
        if prefills:
            self._prefill = _median_line(prefills)
        decodes = [each.decode for each in times if each.decode is not None and each.decode.unit_s]
        self._step_s = min((line.at(1) for line in decodes), default=0.0)
        slopes = [line.unit_s * self.guesses.answer_tokens for line in decodes]
        self._request_s = _median(slopes, self._request_s)
        self.stale = frozenset(
            view.record.key for view in engines if self.slow_prefill_age_s(view) or self.slow_decode_age_s(view)
        )

    def _forget_old(self, now_s: float) -> None:
        """Forget engines that were not seen for `STALE_S`.

        Not at once: a pinned request may pass only a few engines.
        """
        self._steps = {key: reports for key, reports in self._steps.items() if now_s - reports.seen_s <= STALE_S}
        self._lanes = {key: lanes for key, lanes in self._lanes.items() if key in self._steps}
        known = {key.engine_id for key in self._steps}
        self._nodes = {engine_id: node for engine_id, node in self._nodes.items() if engine_id in known}
        for nodes in [nodes for nodes, newest in self._between.items() if now_s - newest[-1].at_s > STALE_S]:
            del self._between[nodes]

    def prefill_s(self, view: EngineView, num_tokens: int) -> float:
        """Return the time in which an engine computes prompt tokens, in as many steps as they need."""
        line, own = self._prefill, None if view.stats is None else view.stats.step_times.prefill
        if own is not None and not _are_alike(_typical_s(own), _typical_s(line)):
            line = own
        num_steps = -(-num_tokens // view.record.max_num_batched_tokens)
        return num_steps * line.base_s + num_tokens * line.unit_s

    def request_s(self, view: EngineView) -> float:
        """Return the time by which one more request delays the answers of an engine."""
        decode = None if view.stats is None else view.stats.step_times.decode
        own_s = 0.0 if decode is None else decode.unit_s * self.guesses.answer_tokens
        return own_s if own_s and not _are_alike(own_s, self._request_s) else self._request_s

    def slowness_s(self, view: EngineView) -> float:
        """Return by how much later an answer is complete than in the engine with the fastest steps, each alone.

        It is 0 while it is unknown: an engine whose batches all had about one size has no line.
        """
        decode = None if view.stats is None else view.stats.step_times.decode
        if decode is None or not decode.unit_s or not self._step_s or _are_alike(decode.at(1), self._step_s):
            return 0.0
        later_s = decode.at(1) - self._step_s  # negative if the engine has become the fastest one since `renew`
        return max(0.0, later_s) * self.guesses.answer_tokens

    def slow_prefill_age_s(self, view: EngineView) -> float:
        """Return the age of the figure of an engine that measured slow prompts; 0 up to `STALE_S`.

        It is also 0 for engines that are not slow.
        """
        reports = self._reports_of(view)
        own = reports.times.prefill
        if own is None or _typical_s(own) <= ALIKE * _typical_s(self._prefill):
            return 0.0
        return reports.prefill.stale_s(self._clock())

    def slow_decode_age_s(self, view: EngineView) -> float:
        """Return the same for an engine's decode steps."""
        reports = self._reports_of(view)
        if not self.slowness_s(view) and self.request_s(view) <= self._request_s:
            return 0.0
        return reports.decode.stale_s(self._clock())

    def read_s(self, reader: EngineView, source: EngineRecord) -> Line:
        """Return the time in which an engine reads KV from another one, as a line by tokens."""
        own = self._lanes_of(reader).measured.get(source.engine_id)
        now_s = self._clock()
        nodes = source.node_id, reader.record.node_id
        others = self._fresh_between(nodes, now_s)
        if own is not None and now_s - own.at_s <= STALE_S and not _all_slowed_down(own, others):
            return own.read_s
        if others:
            return _median_line([each.read_s for each in others])
        if own is not None:
            return own.read_s
        same_node = nodes[0] == nodes[1]
        return Line(0.0, 1 / (self.guesses.node_tokens_per_s if same_node else self.guesses.network_tokens_per_s))

    def measured_s(self, reader: EngineView, source: EngineRecord) -> float:
        """Return when a pair's newest measurement, or else the pair itself, was reported; minus infinity if never."""
        own = self._lanes_of(reader).measured.get(source.engine_id)
        return -math.inf if own is None else own.at_s

    def stale_read_s(self, reader: EngineView, source: EngineRecord) -> float:
        """Return the age of a pair's own figure if `read_s` uses it although it is stale; otherwise 0."""
        own, now_s = self._lanes_of(reader).measured.get(source.engine_id), self._clock()
        if own is None or now_s - own.at_s <= STALE_S:
            return 0.0
        return 0.0 if self._fresh_between((source.node_id, reader.record.node_id), now_s) else now_s - own.at_s

    def _fresh_between(self, nodes: Nodes, now_s: float) -> list[_Measured]:
        """Return the newest measurements of pairs of two nodes, without stale ones."""
        return [each for each in self._between.get(nodes, ()) if now_s - each.at_s <= STALE_S]

    def _reports_of(self, view: EngineView) -> _StepReports:
        key, now_s = view.record.key, self._clock()
        times = StepTimes() if view.stats is None else view.stats.step_times
        if (reports := self._steps.get(key)) is None:
            reports = self._steps[key] = _StepReports(times, now_s)
        elif times is not reports.times:
            reports.update(times, now_s)
        return reports

    def _lanes_of(self, view: EngineView) -> _Lanes:
        lanes = self._lanes.setdefault(view.record.key, _Lanes())
        if view.transfers is not None and view.transfers is not lanes.reported:
            for peer, measured in lanes.update(view.transfers, self._clock()):
                if (node := self._nodes.get(peer)) is not None:
                    self._between[node, view.record.node_id].append(measured)
        return lanes


def _typical_s(line: Line) -> float:
    return line.at(TYPICAL_TOKENS)


def _all_slowed_down(own: _Measured, others: Sequence[_Measured]) -> bool:
    """Return whether the newest measurements between two nodes are all much slower than a pair's own, older one."""
    much_s = SLOWED_DOWN * _typical_s(own.read_s)
    return len(others) == NEWEST and all(each.at_s > own.at_s and _typical_s(each.read_s) > much_s for each in others)


def _median_line(lines: Sequence[Line]) -> Line:
    return sorted(lines, key=_typical_s)[(len(lines) - 1) // 2]


def _are_alike(one: float, other: float) -> bool:
    return one <= ALIKE * other and other <= ALIKE * one


def _median(values: Sequence[float], unknown: float) -> float:
    return statistics.median_low(values) if values else unknown
