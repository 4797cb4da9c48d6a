"""Hand-offs between a prefill engine and the decode engines that can read from it, and the cheapest of them."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from baton.cluster.contracts import EngineRecord, EngineView

from .cost import Cost
from .rates import ALIKE, LearntRates

NUM_RECEIVERS = 8  # decode engines, the least loaded ones, whose links to a prefill engine are compared


@dataclass(frozen=True)
class Handoff:
    """A hand-off of one prefill engine."""

    seconds: float
    cost_s: float  # with the cost of the reader's load
    measured_s: float  # time of the newest measurement of the pair's reads
    stale_s: float  # age of the pair's figure, if it is used although it is stale; otherwise 0

    def is_slow_beside(self, other: Handoff) -> bool:
        """Return whether the link makes this hand-off the slower one, by a stale figure."""
        return self.stale_s > 0 and self.seconds > ALIKE * other.seconds


class DecodeCandidate(NamedTuple):
    """A decode engine that may read the KV of a request."""

    view: EngineView
    missing: int  # tokens that a hand-off has to transfer
    decode_s: float

    def handoff(self, source: EngineRecord, seconds: float, rates: LearntRates) -> Handoff:
        """Return the hand-off from `source` to this engine, which takes `seconds`."""
        measured_s, stale_s = rates.measured_s(self.view, source), rates.stale_read_s(self.view, source)
        return Handoff(seconds, seconds + self.decode_s, measured_s, stale_s)


class Receivers:
    """Finds the cheapest decode engine for each prefill engine, without comparing every pair.

    Candidates are the least loaded decode engines among all, and the least loaded on the prefill engine's node.
    """

    def __init__(self, receivers: Iterable[DecodeCandidate], cost: Cost, rates: LearntRates) -> None:
        self._cost, self._rates = cost, rates
        everywhere: defaultdict[str, list[DecodeCandidate]] = defaultdict(list)  # by fingerprint
        near: defaultdict[tuple[str, str], list[DecodeCandidate]] = defaultdict(list)  # by fingerprint and node
        for receiver in receivers:
            record = receiver.view.record
            everywhere[record.fingerprint].append(receiver)
            near[record.fingerprint, record.node_id].append(receiver)
        guessed = rates.guesses.node_tokens_per_s

        def idlest(receivers: list[DecodeCandidate]) -> list[DecodeCandidate]:
            return heapq.nsmallest(NUM_RECEIVERS, receivers, key=lambda each: each.decode_s + each.missing / guessed)

        self._everywhere = {fingerprint: idlest(receivers) for fingerprint, receivers in everywhere.items()}
        self._near = {place: idlest(receivers) for place, receivers in near.items()}

    def cheapest(self, source: EngineRecord, num_requests: int, ready_s: float) -> Handoff | None:
        """Return the cheapest hand-off of a prompt from `source`, which has `num_requests` and is ready in `ready_s`.

        None if no decode engine can fetch this engine's KV.
        """
        near = self._near.get((source.fingerprint, source.node_id), [])
        receivers = {each.view.record.rank: each for each in (*near, *self._everywhere.get(source.fingerprint, []))}
        best: tuple[float, DecodeCandidate] | None = None
        for each in receivers.values():
            seconds = self._cost.handoff_s(each.view, source, each.missing, before=num_requests, ready_s=ready_s)
            if best is None or seconds + each.decode_s < best[0] + best[1].decode_s:
                best = seconds, each
        return None if best is None else best[1].handoff(source, best[0], self._rates)
