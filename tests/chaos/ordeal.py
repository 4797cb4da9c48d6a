"""One fault under load, and what must hold whatever it is.

load runs ─> apply ─ hold ─> heal ─────────> recovered ─ a while ─> load ends ─> everything is clean
                              │ recovery_s │
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import httpx
from faults import Fault
from load import Answerer, Fate, Load, Quiz
from ray_hosts import REQUEST_TIMEOUT_S, BatonOnHosts
from served import eventually

STREAMS = 16
DEADLINE_S = REQUEST_TIMEOUT_S + 10  # of a request; the gateway's own is shorter
BEFORE_S = 2.0
AFTER_S = 2.0
RECOVERY_TIMEOUT_S = 180.0
CLEAN_TIMEOUT_S = 40.0  # longer than leases


@dataclass(frozen=True)
class Verdict:
    """What one fault did. `problems` is empty where everything held that must."""

    fault: str
    fates: Counter[Fate]
    recovery_s: float
    longest_s: float  # the request that took longest
    problems: tuple[str, ...]

    def line(self) -> str:
        counts = ", ".join(f"{self.fates[fate]} {fate}" for fate in Fate)
        end = "; ".join(self.problems) or "all held"
        return f"{self.fault}: {counts}; recovered in {self.recovery_s:.1f} s, longest {self.longest_s:.1f} s; {end}"


class Ordeal:
    """Faults, one after another, to an application that is whole."""

    def __init__(self, baton: BatonOnHosts, quiz: Quiz, seed: int) -> None:
        self._baton, self._quiz, self._seed = baton, quiz, seed
        self._healthy = baton.census()
        self._answerer = Answerer(baton.url, DEADLINE_S)
        self._number = 0

    def endure(self, fault: Fault) -> Verdict:
        """Applies and heals it under load. Raises `AssertionError` where the application does not come back."""
        self._number += 1
        with Load(self._answerer, self._quiz, streams=STREAMS, seed=self._seed * 10_000 + self._number) as load:
            eventually(lambda: load.counts()[Fate.RIGHT] > 0, DEADLINE_S, "no answer before the fault")
            time.sleep(BEFORE_S)
            fault.apply(self._baton)
            time.sleep(fault.hold_s)
            fault.heal(self._baton)
            recovery_s = self._recovery_s(load)
            time.sleep(AFTER_S)
        return Verdict(
            fault.name,
            load.counts(),
            recovery_s,
            max(asked.ended_s - asked.started_s for asked in load.asked),
            (*_broken(load, fault), *self._stranded()),
        )

    def _recovery_s(self, load: Load) -> float:
        """Until every process is there again, and a question asked from now on was answered."""
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
    forbidden = [Fate.WRONG, Fate.HUNG] if fault.breaks_streams else [Fate.WRONG, Fate.HUNG, Fate.LOST]
    found = load.of_fate(*forbidden)
    return [f"{len(found)} requests went wrong, the first {found[0]}"] if found else []


def summary(verdicts: Iterable[Verdict]) -> str:
    """All figures in one line."""
    verdicts = list(verdicts)
    total = sum((verdict.fates for verdict in verdicts), Counter[Fate]())
    recovery = sorted(verdict.recovery_s for verdict in verdicts)
    counts = " ".join(f"{fate}={total[fate]}" for fate in Fate)
    return (
        f"chaos: faults={len(verdicts)} requests={total.total()} {counts} "
        f"recovery_p50_s={statistics.median(recovery):.1f} recovery_max_s={recovery[-1]:.1f} "
        f"failed={sum(bool(verdict.problems) for verdict in verdicts)}"
    )
