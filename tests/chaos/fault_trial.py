"""One fault under load, and the requirements that hold for every fault.

load runs ─> apply ─ hold ─> heal ─────────> whole again ─ a while ─> load ends ─> everything is clean
               │ answered_s: first answer     │
               │ to a request sent from here  │ recovery_s, from heal on: all processes are back
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import httpx

from ..helpers.served import eventually
from ..hosts.ray_hosts import REQUEST_TIMEOUT_S, BatonOnHosts
from .faults import Fault
from .load import Answerer, Fate, Load, Quiz

STREAMS = 16
DEADLINE_S = REQUEST_TIMEOUT_S + 10  # for one request; the gateway's own deadline is shorter
BEFORE_S = 2.0
AFTER_S = 2.0
RECOVERY_TIMEOUT_S = 180.0
CLEAN_TIMEOUT_S = 40.0  # longer than leases


@dataclass(frozen=True)
class Verdict:
    """The outcome of one fault. `problems` is empty if every requirement held."""

    fault: str
    fates: Counter[Fate]
    answered_s: float  # from the fault's beginning to the first answer to a request sent after it
    recovery_s: float  # from its end until there were as many processes as before, and one more answer
    longest_s: float  # duration of the slowest request
    pause_s: float  # the longest time that a client waited for the next piece of an answer that became whole
    resumed: int  # right answers that more than one gateway wrote
    decisions: Counter[float]  # the gateways' decisions about failed attempts, by an upper bound of the seconds taken
    problems: tuple[str, ...]

    def line(self) -> str:
        counts = ", ".join(f"{self.fates[fate]} {fate}" for fate in Fate)
        end = "; ".join(self.problems) or "all held"
        waited = f"longest {self.longest_s:.1f} s, pause {self.pause_s:.1f} s"
        return (
            f"{self.fault}: {counts}, {self.resumed} resumed; answers after {self.answered_s:.1f} s,"
            f" whole after {self.recovery_s:.1f} s, {waited}; {_spelled(self.decisions)}; {end}"
        )


class FaultTrial:
    """Inject faults, one after another, into an application that is whole."""

    def __init__(self, baton: BatonOnHosts, quiz: Quiz, seed: int) -> None:
        self._baton, self._quiz, self._seed = baton, quiz, seed
        self._healthy = baton.census()
        self._answerer = Answerer(baton.url, DEADLINE_S)
        self._number = 0

    def run(self, fault: Fault) -> Verdict:
        """Apply a fault under load, and heal it. Raises `AssertionError` if the application does not recover."""
        self._number += 1
        before = self._baton.decisions()
        with Load(self._answerer, self._quiz, streams=STREAMS, seed=self._seed * 10_000 + self._number) as load:
            eventually(lambda: load.counts()[Fate.RIGHT] > 0, DEADLINE_S, "no answer before the fault")
            time.sleep(BEFORE_S)
            began_s = time.monotonic()
            fault.apply(self._baton)
            time.sleep(fault.hold_s)
            fault.heal(self._baton)
            recovery_s = self._recovery_s(load)
            time.sleep(AFTER_S)
        right = load.of_fate(Fate.RIGHT)
        return Verdict(
            fault=fault.name,
            fates=load.counts(),
            answered_s=min(asked.ended_s for asked in right if asked.started_s > began_s) - began_s,
            recovery_s=recovery_s,
            longest_s=max(asked.ended_s - asked.started_s for asked in load.asked),
            pause_s=max(asked.answer.pause_s for asked in right),
            resumed=sum(asked.answer.resumed for asked in right),
            decisions=_more(before, self._baton.decisions()),
            problems=(*_broken(load, fault), *self._stranded()),
        )

    def _recovery_s(self, load: Load) -> float:
        """Return the seconds until all processes are back, and a question asked from now on was answered."""
        start_s = time.monotonic()

        def answered() -> bool:
            return any(asked.started_s > start_s for asked in load.of_fate(Fate.RIGHT))

        eventually(lambda: answered() and self._is_whole(), RECOVERY_TIMEOUT_S, lambda: self._why_not(load))
        return time.monotonic() - start_s

    def _is_whole(self) -> bool:
        return self._baton.is_whole() and self._baton.census() == self._healthy

    def _why_not(self, load: Load) -> str:
        now = self._baton.census()
        parts = [f"missing {dict(self._healthy - now)}, left over {dict(now - self._healthy)}", self._baton.state()]
        with contextlib.suppress(httpx.HTTPError):
            parts.append(f"engines: {self._baton.ranks()}")
        return "\n".join([*parts, f"the last requests: {load.asked[-3:]}"])

    def _stranded(self) -> list[str]:
        try:
            eventually(self._baton.is_clean, CLEAN_TIMEOUT_S, lambda: f"stranded: {self._baton.ranks()}")
        except AssertionError as error:
            return [str(error)]
        extra = self._baton.census() - self._healthy
        return [f"processes left over: {dict(extra)}"] if extra else []


def _broken(load: Load, fault: Fault) -> list[str]:
    forgiven = {Fate.RIGHT, *[Fate.REFUSED] * fault.hides_gateway}
    found = load.of_fate(*set(Fate) - forgiven)
    return [f"{len(found)} requests went wrong, the first {found[0]}"] if found else []


def _more(before: Counter[float], after: Counter[float]) -> Counter[float]:
    """Return by how much counters rose; their value where they restarted with another gateway."""
    return after - before if all(after[bound] >= count for bound, count in before.items()) else +after


def _spelled(decisions: Counter[float]) -> str:
    bounds = sorted(decisions.elements())
    if not bounds:
        return "decisions=0"
    return f"decisions={len(bounds)} decision_p50_s<={bounds[(len(bounds) - 1) // 2]:g} decision_max_s<={bounds[-1]:g}"


def summary(verdicts: Iterable[Verdict]) -> str:
    """Return all figures in one line."""
    verdicts = list(verdicts)
    total = sum((verdict.fates for verdict in verdicts), Counter[Fate]())
    counts = " ".join(f"{fate}={total[fate]}" for fate in Fate)
    answered, recovery = ([getattr(verdict, name) for verdict in verdicts] for name in ("answered_s", "recovery_s"))
    return (
        f"chaos: faults={len(verdicts)} requests={total.total()} {counts} "
        f"resumed={sum(verdict.resumed for verdict in verdicts)} "
        f"{_spelled(sum((verdict.decisions for verdict in verdicts), Counter[float]()))} "
        f"pause_max_s={max(verdict.pause_s for verdict in verdicts):.1f} "
        f"answered_p50_s={statistics.median(answered):.1f} answered_max_s={max(answered):.1f} "
        f"recovery_p50_s={statistics.median(recovery):.1f} recovery_max_s={max(recovery):.1f} "
        f"failed={sum(bool(verdict.problems) for verdict in verdicts)}"
    )
