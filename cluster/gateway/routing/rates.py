"""The rates of the cost formula (`cost.py`): engines measure them, and tell them with their status.

Before that, they are those of the settings.

    prefill of a prompt    by its tokens, in each engine (`StepTimes.prefill`)
    one more request       by which it lengthens an engine's steps (`StepTimes.decode`)
    a read of blocks       by their number, for each pair of engines (`PeerLane.read_s`)

Engines measure, so all gateways know the same, and one that starts knows it with the first messages. An engine that has
measured nothing yet is taken to be like the median of the others. So is one whose figure is within `ALIKE` of it:
equal engines measure a little different times, and chance must not send all requests to one of them.

A pair of engines that was not measured for `STALE_S` is taken to be like others of the same two nodes that were, and
sooner where all of these have become much slower.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pydantic import Field

from baton.cluster.contracts import EngineRecord, EngineView
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.pace import Line
from baton.engine.strict_model import StrictModel
from baton.kv_transfer.protocol.stats import PeerLane, TransferStats

from .prefix_index import EngineKey, engine_key

ALIKE = 1.5
STALE_S = 60.0
NEWEST = 5  # measurements of the pairs of two nodes, whose median is that of the pairs
SLOWED_DOWN = 3.0  # times as long as a pair took: where all newer measurements show it, it holds for the pair, too
RENEWED_S = 1.0  # between two looks at the medians
TYPICAL_TOKENS = 1024  # of prompts, at which lines are compared


class CostRates(StrictModel):
    """Settings of the cost formula. Defaults: an 8B model on H200s, NVLink within a node, 400 Gbit/s between nodes.

    Rates are first guesses, until engines have measured theirs.
    """

    prefill_tokens_per_s: float = Field(20_000.0, gt=0)  # of one engine; a guess
    decode_request_s: float = Field(0.01, ge=0)  # that one more request delays the answers of an engine; a guess
    answer_tokens: int = Field(256, ge=0)  # steps for which that is counted, once they are measured
    stall_weight: float = Field(1.0, ge=0)  # a second without tokens for a running answer, in seconds of this cost
    block_release_s: float = Field(1.0, ge=0)  # until a prefill engine full of held blocks has room again
    handoff_s: float = Field(0.003, ge=0)  # of a hand-off beside the read
    slow_handoff_s: float = Field(0.02, ge=0)  # one that takes no longer is made without comparing costs
    node_tokens_per_s: float = Field(1_000_000.0, gt=0)  # KV of so many tokens between engines of one node; a guess
    network_tokens_per_s: float = Field(250_000.0, gt=0)  # between nodes; a guess


Nodes = tuple[str, str]  # of the engine that is read, and of the reader


class _Measured(NamedTuple):
    at_s: float  # when this gateway heard of it
    read_s: Line  # by tokens


class _Lanes:
    """The ways in which one engine reads others."""

    def __init__(self) -> None:
        self.told: TransferStats | None = None
        self.by_peer: dict[str, PeerLane] = {}
        self.measured: dict[str, _Measured] = {}  # the newest of each peer, or what was known at pairing

    def update(self, told: TransferStats, now_s: float) -> list[tuple[str, _Measured]]:
        """Take in what the reader tells. Returns what it has measured of which peers since."""
        self.told, old = told, self.by_peer
        self.by_peer = {lane.engine_id: lane for lane in told.lanes}
        self.measured = {peer: known for peer, known in self.measured.items() if peer in self.by_peer}
        news = []
        for peer, lane in self.by_peer.items():
            is_new = peer not in old or old[peer].num_reads != lane.num_reads
            if lane.read_s is not None and is_new:
                by_tokens = Line(lane.read_s.base_s, lane.read_s.unit_s / BLOCK_SIZE)
                self.measured[peer] = _Measured(now_s, by_tokens)
                if lane.num_reads:
                    news.append((peer, self.measured[peer]))
        return news


class LearntRates:
    """The rates that one gateway knows."""

    def __init__(self, guesses: CostRates, clock: Callable[[], float]) -> None:
        self.guesses = guesses
        self._clock = clock
        self._renewed_s, self._is_measured = -RENEWED_S, False
        self._lanes: dict[EngineKey, _Lanes] = {}
        self._nodes: dict[str, str] = {}  # by engine
        self._between: defaultdict[Nodes, deque[_Measured]] = defaultdict(lambda: deque(maxlen=NEWEST))
        self._prefill = Line(0.0, 1 / guesses.prefill_tokens_per_s)  # the median
        self._request_s = guesses.decode_request_s
        self._step_s = 0.0  # of the fastest; 0: not known

    def reconfigure(self, guesses: CostRates) -> None:
        """Take other settings from the next choice on. What engines have measured goes before guesses, as ever."""
        self.guesses = guesses
        if not self._is_measured:
            self._prefill = Line(0.0, 1 / guesses.prefill_tokens_per_s)
        self._request_s = guesses.decode_request_s
        self._renewed_s = -RENEWED_S

    def renew(self, engines: Sequence[EngineView]) -> None:
        """Look at what engines tell: once a second, and until one of them has measured something."""
        now_s = self._clock()
        if self._is_measured and now_s - self._renewed_s < RENEWED_S:
            return
        self._renewed_s = now_s
        alive = {engine_key(view.record) for view in engines}
        self._lanes = {key: lanes for key, lanes in self._lanes.items() if key in alive}
        self._nodes = {view.record.engine_id: view.record.node_id for view in engines}
        for nodes in [nodes for nodes, newest in self._between.items() if now_s - newest[-1].at_s > STALE_S]:
            del self._between[nodes]
        times = [view.stats.step_times for view in engines if view.stats is not None]
        prefills = [each.prefill for each in times if each.prefill is not None]
        self._is_measured = bool(prefills)
        if prefills:
            self._prefill = _median_line(prefills)
        decodes = [each.decode for each in times if each.decode is not None and each.decode.unit_s]
        self._step_s = min((line.at(1) for line in decodes), default=0.0)
        slopes = [line.unit_s * self.guesses.answer_tokens for line in decodes]
        self._request_s = _median(slopes, self._request_s)

    def prefill_s(self, view: EngineView, num_tokens: int) -> float:
        """Return the time that an engine takes to compute tokens of prompts, in as many steps as they need."""
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
        """Return the time by which an answer is later than in the engine whose steps are fastest, without others.

        While an engine's batches had about one size, its steps cannot be compared.
        """
        decode = None if view.stats is None else view.stats.step_times.decode
        if decode is None or not decode.unit_s or not self._step_s or _are_alike(decode.at(1), self._step_s):
            return 0.0
        later_s = decode.at(1) - self._step_s  # below 0 where the engine has become the fastest since `renew`
        return max(0.0, later_s) * self.guesses.answer_tokens

    def read_s(self, reader: EngineView, source: EngineRecord) -> Line:
        """Return the time in which an engine reads another's tokens, by their number."""
        own = self._lanes_of(reader).measured.get(source.engine_id)
        now_s = self._clock()
        nodes = source.node_id, reader.record.node_id
        others = [each for each in self._between.get(nodes, ()) if now_s - each.at_s <= STALE_S]
        if own is not None and now_s - own.at_s <= STALE_S and not _all_slowed_down(own, others):
            return own.read_s
        if others:
            return _median_line([each.read_s for each in others])
        if own is not None:
            return own.read_s
        same_node = nodes[0] == nodes[1]
        return Line(0.0, 1 / (self.guesses.node_tokens_per_s if same_node else self.guesses.network_tokens_per_s))

    def measured_s(self, reader: EngineView, source: EngineRecord) -> float:
        """Return when this gateway heard of the newest measurement of a pair, or of the pair; never: minus infinity."""
        own = self._lanes_of(reader).measured.get(source.engine_id)
        return -math.inf if own is None else own.at_s

    def _lanes_of(self, view: EngineView) -> _Lanes:
        lanes = self._lanes.setdefault(engine_key(view.record), _Lanes())
        if view.transfers is not None and view.transfers is not lanes.told:
            for peer, measured in lanes.update(view.transfers, self._clock()):
                if (node := self._nodes.get(peer)) is not None:
                    self._between[node, view.record.node_id].append(measured)
        return lanes


def _typical_s(line: Line) -> float:
    return line.at(TYPICAL_TOKENS)


def _all_slowed_down(own: _Measured, others: Sequence[_Measured]) -> bool:
    """Tell whether the newest measurements between two nodes all show what a pair has not felt yet."""
    much_s = SLOWED_DOWN * _typical_s(own.read_s)
    return len(others) == NEWEST and all(each.at_s > own.at_s and _typical_s(each.read_s) > much_s for each in others)


def _median_line(lines: Sequence[Line]) -> Line:
    return sorted(lines, key=_typical_s)[(len(lines) - 1) // 2]


def _are_alike(one: float, other: float) -> bool:
    return one <= ALIKE * other and other <= ALIKE * one


def _median(values: Sequence[float], unknown: float) -> float:
    return statistics.median_low(values) if values else unknown
