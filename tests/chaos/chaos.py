"""`make chaos SECONDS=1800 SEED=1`: random faults on three hosts under load, until the time is over.

Prints the schedule, a line for each fault, and a summary; writes the figures as JSON with `--json`. Exits with 1 if a
requirement was violated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from ..hosts.hosts import Hosts
from ..hosts.ray_hosts import ENGINE_HOSTS, HEAD, BatonOnHosts, demo_config
from .fault_trial import DEADLINE_S, STREAMS, FaultTrial, Verdict, summary
from .faults import Fault, all_faults
from .load import Answerer, Quiz
from .schedule import make_schedule

QUESTIONS = 64
SHORTEST_S = 10.0  # least time of a fault with its load: a schedule with a fault per so many seconds is long enough
MIN_ACCURACY = 0.95  # share of right answers of the demo model without faults


def run(seconds: float, seed: int) -> list[Verdict]:
    """Run the faults, and return their verdicts.

    Raises `RuntimeError` if hosts cannot be made, `AssertionError` if the application does not recover.
    """
    faults = {fault.name: fault for fault in all_faults(seed)}
    schedule = make_schedule(seed, max(1, round(seconds / SHORTEST_S)), sorted(faults))
    print(f"seed {seed}, {STREAMS} streams; until {seconds:.0f} s are over:", flush=True)
    for planned in schedule:
        print(f"  {planned.number:3d}  after {planned.pause_s:3.1f} s  {planned.fault}")
    verdicts: list[Verdict] = []
    with Hosts(HEAD, *ENGINE_HOSTS) as hosts, BatonOnHosts(hosts) as baton:
        baton.start(demo_config())
        quiz = Quiz(seed, QUESTIONS)
        accuracy = quiz.learn(Answerer(baton.url, DEADLINE_S), STREAMS)
        assert accuracy >= MIN_ACCURACY, f"an undisturbed server is right {accuracy:.1%} of the time"
        trial = FaultTrial(baton, quiz, seed)
        end_s = time.monotonic() + seconds
        for planned in schedule:
            time.sleep(planned.pause_s)
            if time.monotonic() > end_s:
                break
            verdicts.append(tried(trial, faults[planned.fault]))
    return verdicts


def tried(trial: FaultTrial, fault: Fault) -> Verdict:
    verdict = trial.run(fault)
    print(verdict.line(), flush=True)
    return verdict


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict with counters as JSON objects: by name."""
    counts = {"fates": verdict.fates, "decisions": verdict.decisions}
    named = {name: {str(key): count for key, count in counter.items()} for name, counter in counts.items()}
    return {**dataclasses.asdict(verdict), **named}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--seconds", type=float, default=600.0, help="no fault begins later")
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--json", type=Path, help="write all figures to this file")
    given = words.parse_args()
    verdicts = run(given.seconds, given.seed)
    if given.json:
        given.json.write_text(json.dumps([as_json(verdict) for verdict in verdicts], indent=1) + "\n")
    print(summary(verdicts))
    sys.exit(1 if any(verdict.problems for verdict in verdicts) else 0)


if __name__ == "__main__":
    main()
