"""The rates of the cost formula (`cost.py`): measured by the engines, told with their status; before that, the settings.

    prefill of a prompt    by its tokens, in each engine (`StepTimes.prefill`)
    one more request       by which it lengthens an engine's steps (`StepTimes.decode`)
    a read of blocks       by their number, for each pair of engines (`PeerLane.read_s`)

Engines measure, so all gateways know the same, and one that starts knows it with the first messages. An engine that has
measured nothing yet is taken to be like the median of the others. So is one whose figure is within `ALIKE` of it:
equal engines measure a little different times, and chance must not send all requests to one of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from baton.cluster.contracts import EngineRecord, EngineView
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.pace import Line
from baton.kv_transfer.protocol.stats import PeerLane, TransferStats

from .cost import CostRates
from .prefix_index import EngineKey, engine_key

ALIKE = 1.5
RENEWED_S = 1.0  # between two looks at the medians
TYPICAL_TOKENS = 1024  # of prompts, at which engines are compared


class _Lanes:
    """The ways in which one engine reads others."""

    def __init__(self) -> None:
        self.told: TransferStats | None = None
        self.by_peer: dict[str, PeerLane] = {}
        self.measured_s: dict[str, float] = {}  # when this gateway heard of the newest measurement

    def update(self, told: TransferStats, now_s: float) -> None:
        self.told, old = told, self.by_peer
        self.by_peer = {lane.engine_id: lane for lane in told.lanes}
        self.measured_s = {
            peer: self.measured_s[peer] if peer in old and old[peer].num_reads == lane.num_reads else now_s
            for peer, lane in self.by_peer.items()
        }


class LearntRates:
    """The rates that one gateway knows."""

    def __init__(self, guesses: CostRates, clock: Callable[[], float]) -> None:
        self.guesses = guesses
        self._clock = clock
        self._renewed_s = -RENEWED_S
        self._lanes: dict[EngineKey, _Lanes] = {}
        self._prefill = Line(0.0, 1 / guesses.prefill_tokens_per_s)  # the median
        self._request_s = guesses.decode_request_s
        self._step_s = 0.0  # of the fastest; 0: not known

    def renew(self, engines: Sequence[EngineView]) -> None:
        """Look at what engines tell, once a second."""
        now_s = self._clock()
        if now_s - self._renewed_s < RENEWED_S:
            return
        self._renewed_s = now_s
        alive = {engine_key(view.record) for view in engines}
        self._lanes = {key: lanes for key, lanes in self._lanes.items() if key in alive}
        times = [view.stats.step_times for view in engines if view.stats is not None]
        prefills = [each.prefill for each in times if each.prefill is not None]
        if prefills:
            self._prefill = sorted(prefills, key=_typical_s)[(len(prefills) - 1) // 2]
        decodes = [each.decode for each in times if each.decode is not None]
        self._step_s = min((line.at(1) for line in decodes), default=0.0)
        slopes = [line.unit_s * self.guesses.answer_tokens for line in decodes if line.unit_s]
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
        """Return the time by which an answer is later than in the engine whose steps are fastest, without others."""
        decode = None if view.stats is None else view.stats.step_times.decode
        if decode is None or not self._step_s or _are_alike(decode.at(1), self._step_s):
            return 0.0
        return (decode.at(1) - self._step_s) * self.guesses.answer_tokens

    def read_s(self, reader: EngineView, source: EngineRecord) -> Line:
        """Return the time in which an engine reads another's tokens, by their number."""
        lane = self._lanes_of(reader).by_peer.get(source.engine_id)
        if lane is not None and lane.read_s is not None:
            return Line(lane.read_s.base_s, lane.read_s.unit_s / BLOCK_SIZE)
        same_node = reader.record.node_id == source.node_id
        return Line(0.0, 1 / (self.guesses.node_tokens_per_s if same_node else self.guesses.network_tokens_per_s))

    def measured_s(self, reader: EngineView, source: EngineRecord) -> float:
        """Return when this gateway heard of the newest measurement of a pair; never: the distant past."""
        return self._lanes_of(reader).measured_s.get(source.engine_id, -float("inf"))

    def _lanes_of(self, view: EngineView) -> _Lanes:
        lanes = self._lanes.setdefault(engine_key(view.record), _Lanes())
        if view.transfers is not None and view.transfers is not lanes.told:
            lanes.update(view.transfers, self._clock())
        return lanes


def _typical_s(prefill: Line) -> float:
    return prefill.at(TYPICAL_TOKENS)


def _are_alike(one: float, other: float) -> bool:
    return one <= ALIKE * other and other <= ALIKE * one


def _median(values: Sequence[float], unknown: float) -> float:
    return statistics.median_low(values) if values else unknown
